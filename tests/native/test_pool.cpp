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
      counter.reset();
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

// Plain memory on purpose, as above: what one piece wrote is read after the share.
void shared_work_orders_memory(int threads, int runs) {
  ThreadPool pool(threads);
  constexpr int kOps = 6, kTotal = 40;
  std::vector<WorkCounter> counters(kOps);
  std::vector<int64_t> values(kTotal);
  bool right = true;
  for (int run = 0; run < runs; run++) {
    for (WorkCounter& counter : counters) counter.reset();
    for (int i = 0; i < kTotal; i++) values[i] = i;
    pool.run([&](int) {
      for (int op = 0; op < kOps; op++) {
        // Half of the values are made of the other half, in turns.
        const int own = op % 2, other = 1 - own;
        pool.share(counters[op], kTotal / 2, 1 + op, [&](int begin, int end) {
          for (int i = begin; i < end; i++) values[2 * i + own] += values[2 * ((i + 7) % (kTotal / 2)) + other];
        });
      }
    });
    std::vector<int64_t> expected(kTotal);
    for (int i = 0; i < kTotal; i++) expected[i] = i;
    for (int op = 0; op < kOps; op++) {
      for (int i = 0; i < kTotal / 2; i++) {
        expected[2 * i + op % 2] += expected[2 * ((i + 7) % (kTotal / 2)) + 1 - op % 2];
      }
    }
    right = right && values == expected;
  }
  expect(right, "work in turns by " + std::to_string(threads) + " threads");
}

// A thread that does not get its core finds everything done and holds nobody up.
void a_late_thread_holds_nobody_up() {
  ThreadPool pool(2);
  std::vector<WorkCounter> counters(50);
  std::atomic<bool> is_done{false};
  int seen = 0;
  pool.run([&](int thread) {
    // It comes when all is done; were it waited for, this would never end.
    while (thread == 1 && !is_done.load()) std::this_thread::yield();
    for (WorkCounter& counter : counters) {
      pool.share(counter, 9, 2, [&](int begin, int end) { seen += end - begin; });
    }
    if (thread == 0) is_done.store(true);
  });
  expect(seen == 50 * 9, "all the work is done by the thread that is there");
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
    shared_work_orders_memory(threads, threads == 2 ? 400 : 60);
  }
  a_late_thread_holds_nobody_up();
  sleepers_wake();
}

}  // namespace isobatch::testing
