// Persistent threads that run one function together, with cheap barriers inside it.
//
// Waiting spins for a few microseconds, then sleeps: a step's ops are a few microseconds apart, but another process may
// want the same cores. Work is shared so that a thread without a core holds up one piece at most.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace isobatch {

// Hands out [0, total) in pieces to whichever thread asks; one per op, reset between runs.
struct alignas(64) WorkCounter {
  std::atomic<int> next{0};
  std::atomic<int> done{0};

  void reset() {
    next.store(0, std::memory_order_relaxed);
    done.store(0, std::memory_order_relaxed);
  }

  // Returns how much of it this thread did.
  template <class F>
  int share(int total, int piece, F&& body) {
    if (piece < 1) piece = 1;
    for (int mine = 0;;) {
      const int begin = next.fetch_add(piece, std::memory_order_relaxed);
      if (begin >= total) return mine;
      const int end = begin + piece < total ? begin + piece : total;
      body(begin, end);
      mine += end - begin;
    }
  }
};

class ThreadPool {
 public:
  // The calling thread of `run` is thread 0; size - 1 threads are started.
  explicit ThreadPool(int size);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }

  // Calls fn(context, thread) on every thread and returns when all have returned. fn must not throw.
  void run(void (*fn)(void*, int), void* context);

  template <class F>
  void run(F&& body) {
    run([](void* context, int thread) { (*static_cast<std::remove_reference_t<F>*>(context))(thread); }, &body);
  }

  // Shares work out and returns when all of it is done, by whatever threads; what they wrote is visible after. A thread
  // that comes late, because another process had its core, finds nothing left to do and holds nobody up.
  template <class F>
  void share(WorkCounter& work, int total, int piece, F&& body) {
    const int mine = work.share(total, piece, body);
    if (size_ == 1) return;
    if (mine > 0 && work.done.fetch_add(mine, std::memory_order_acq_rel) + mine == total) publish(completions_);
    else wait_until_done(work.done, total);
  }

  // Returns when every thread of the current run has called it. What others wrote before is visible after.
  void barrier();

 private:
  void worker(int thread);
  void wait_until_done(const std::atomic<int>& done, int total);
  void wait_while_equal(const std::atomic<uint32_t>& word, uint32_t old, int spin_microseconds);
  void publish(std::atomic<uint32_t>& word);

  const int size_;
  void (*fn_)(void*, int) = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint32_t> epoch_{0};    // raised to start a run
  alignas(64) std::atomic<int> arrived_{0};       // threads in the current barrier
  alignas(64) std::atomic<uint32_t> generation_{0};  // raised when a barrier completes
  alignas(64) std::atomic<uint32_t> completions_{0};  // raised when shared work is done
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
};

}  // namespace isobatch
