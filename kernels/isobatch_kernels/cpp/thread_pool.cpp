#include "thread_pool.h"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace isobatch {
namespace {

// Between barriers the others are nearly always a few microseconds away. Longer spinning gains nothing on a free machine
// and costs a lot on a busy one: while this core spins, the system cannot move a descheduled thread here.
constexpr int kBarrierSpinMicroseconds = 5;
// Between steps there is other work to do on these cores, but the next step may follow at once.
constexpr int kIdleSpinMicroseconds = 30;

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int size) : size_(size < 1 ? 1 : size) {
  for (int thread = 1; thread < size_; thread++) threads_.emplace_back([this, thread] { worker(thread); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  publish(epoch_);
  for (auto& thread : threads_) thread.join();
}

void ThreadPool::run(void (*fn)(void*, int), void* context) {
  fn_ = fn;
  context_ = context;
  if (size_ > 1) publish(epoch_);
  fn(context, 0);
  barrier();
}

void ThreadPool::barrier() {
  if (size_ == 1) return;
  const uint32_t generation = generation_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    publish(generation_);
  } else {
    wait_while_equal(generation_, generation, kBarrierSpinMicroseconds);
  }
}

void ThreadPool::worker(int thread) {
  uint32_t seen = 0;
  for (;;) {
    wait_while_equal(epoch_, seen, kIdleSpinMicroseconds);
    seen++;
    if (stop_.load()) return;
    fn_(context_, thread);
    barrier();
  }
}

void ThreadPool::wait_until_done(const std::atomic<int>& done, int total) {
  while (done.load(std::memory_order_acquire) < total) {
    const uint32_t completions = completions_.load();
    // It may have been the last one before that look.
    if (done.load(std::memory_order_acquire) >= total) return;
    wait_while_equal(completions_, completions, kBarrierSpinMicroseconds);
  }
}

void ThreadPool::wait_while_equal(const std::atomic<uint32_t>& word, uint32_t old, int spin_microseconds) {
  const auto start = std::chrono::steady_clock::now();
  const auto limit = std::chrono::microseconds(spin_microseconds);
  do {
    for (int i = 0; i < 16; i++) {
      if (word.load(std::memory_order_acquire) != old) return;
      relax();
    }
  } while (std::chrono::steady_clock::now() - start < limit);
  std::unique_lock<std::mutex> lock(mutex_);
  // The order of this increment and the publisher's store is total: either it sees a sleeper, or we see its word.
  sleepers_.fetch_add(1);
  wake_.wait(lock, [&] { return word.load() != old; });
  sleepers_.fetch_sub(1);
}

void ThreadPool::publish(std::atomic<uint32_t>& word) {
  word.fetch_add(1);
  if (sleepers_.load() > 0) {
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
  }
}

}  // namespace isobatch
