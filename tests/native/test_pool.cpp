// The thread pool: every thread runs, barriers hold everybody back, what was written before is seen after.
#include <numeric>

#include "check.h"
#include "thread_pool.h"

namespace isobatch::testing {
namespace {

// Plain memory on purpose: a race checker sees a barrier that does not order it.
void barriers_order_memory(int threads, int runs) {
  ThreadPool pool(threads);
  std::vector<int> slots(threads);
  std::vector<int64_t> sums(threads);
  constexpr int kRounds = 4;
  bool right = true;
  for (int run = 0; run < runs; run++) {
    pool.run([&](int thread) {
      for (int round = 0; round < kRounds; round++) {
        slots[thread] = run + round + thread;
        pool.barrier();
        sums[thread] = std::accumulate(slots.begin(), slots.end(), (int64_t)0);
        pool.barrier();
      }
    });
    const int64_t expected = (int64_t)threads * (run + kRounds - 1) + (int64_t)threads * (threads - 1) / 2;
    for (int64_t sum : sums) right = right && sum == expected;
  }
  expect(right, "barriers of " + std::to_string(threads) + " threads");
}

void work_is_shared_once(int threads) {
  ThreadPool pool(threads);
  WorkCounter counter;
  bool right = true;
  for (int total : {0, 1, 7, 100, 1001}) {
    for (int piece : {0, 1, 8, 5000}) {
      std::vector<int> taken(total);
      counter.next.store(0);
      pool.run([&](int) {
        counter.share(total, piece, [&](int begin, int end) {
          for (int i = begin; i < end; i++) taken[i]++;
        });
      });
      for (int count : taken) right = right && count == 1;
    }
  }
  expect(right, "work shared by " + std::to_string(threads) + " threads");
}

// Threads that went to sleep wake up, for work and for the end.
void sleepers_wake() {
  for (int i = 0; i < 10; i++) {
    ThreadPool pool(4);
    int calls = 0;
    for (int run = 0; run < 3; run++) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      pool.run([&](int thread) {
        if (thread == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the others wait long
        pool.barrier();
        if (thread == 3) calls++;
      });
    }
    expect(calls == 3, "threads that slept run again");
  }
  ThreadPool never_used(5);
}

}  // namespace

void test_pool() {
  for (int threads : {1, 2, 3, 8}) {
    barriers_order_memory(threads, threads == 2 ? 400 : 60);
    work_is_shared_once(threads);
  }
  sleepers_wake();
}

}  // namespace isobatch::testing
