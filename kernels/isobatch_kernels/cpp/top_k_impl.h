// The K largest logits by (logit descending, id ascending). Included only through row_ops_unit.h.
//
// A scan keeps the best K in a heap whose root is the worst of them. Two bounds keep the heap nearly idle: the K-th largest
// of the group maxima (at least K logits are not below it) until the heap is full, and its root from then on.
#pragma once

namespace isobatch::ISOBATCH_UNIT {
namespace {

constexpr int kGroup = 64;  // ids under one maximum

// A heap of (logit, id) in two arrays of the caller, worst entry first.
struct WorstFirstHeap {
  float* logits;
  int32_t* ids;
  int size;

  bool worse(int a, int b) const { return logits[a] < logits[b] || (logits[a] == logits[b] && ids[a] > ids[b]); }
  void exchange(int a, int b) {
    float x = logits[a]; logits[a] = logits[b]; logits[b] = x;
    int32_t i = ids[a]; ids[a] = ids[b]; ids[b] = i;
  }
  void sift_down(int at, int end) {
    for (int child; (child = 2 * at + 1) < end; at = child) {
      if (child + 1 < end && worse(child + 1, child)) child++;
      if (!worse(child, at)) return;
      exchange(child, at);
    }
  }
  void push(float logit, int32_t id) {
    int at = size++;
    logits[at] = logit;
    ids[at] = id;
    for (; at > 0 && worse(at, (at - 1) / 2); at = (at - 1) / 2) exchange(at, (at - 1) / 2);
  }
  void replace_worst(float logit, int32_t id) {
    logits[0] = logit;
    ids[0] = id;
    sift_down(0, size);
  }
  void sort_best_first() {
    for (int end = size - 1; end > 0; end--) {
      exchange(0, end);
      sift_down(0, end);
    }
  }
};

// The k-th largest (k from 1) of n values; reorders them. Values are compared as integers of the same order, so NaN is safe.
float kth_largest(float* values, int n, int k) {
  auto key = [&](int i) {
    const int32_t bits = (int32_t)float_bits(values[i]);
    return bits ^ (int32_t)((uint32_t)(bits >> 31) >> 1);
  };
  int low = 0, high = n - 1;
  const int want = k - 1;
  while (low < high) {
    const int32_t pivot = key((low + high) / 2);
    int i = low, j = high;
    while (i <= j) {
      while (key(i) > pivot) i++;
      while (key(j) < pivot) j--;
      if (i <= j) {
        float x = values[i]; values[i] = values[j]; values[j] = x;
        i++;
        j--;
      }
    }
    if (want <= j) high = j; else if (want >= i) low = i; else break;
  }
  return values[want];
}

// maxima: largest logit of every kGroup ids; as many floats behind them are overwritten.
// Entries past V get id -1 and the logit -infinity.
void select_top_k(const float* logits, int V, int k, float* maxima, int num_groups, int32_t* ids, float* top) {
  const int want = k < V ? k : V;
  float bound = -INFINITY;
  if (want <= num_groups && 2 * num_groups <= V) {
    float* copy = maxima + num_groups;
    std::memcpy(copy, maxima, (size_t)num_groups * sizeof(float));
    bound = kth_largest(copy, num_groups, want);
  }
  WorstFirstHeap heap{top, ids, 0};
  for (int group = 0; group < num_groups; group++) {
    if (heap.size < want ? !(maxima[group] >= bound) : !(maxima[group] > top[0])) continue;
    const int start = group * kGroup, end = start + kGroup < V ? start + kGroup : V;
    for (int i = start; i < end; i += W) {
      const Vf v = load_n(logits + i, lanes_left(end - i), set(-INFINITY));
      uint32_t hits = heap.size < want ? mask_ge(v, set(bound)) : mask_gt(v, set(top[0]));
      for (; hits != 0; hits &= hits - 1) {
        const int id = i + __builtin_ctz(hits);
        if (id >= end) break;
        if (heap.size < want) heap.push(logits[id], id);
        else if (logits[id] > top[0]) heap.replace_worst(logits[id], id);
      }
    }
  }
  heap.sort_best_first();
  for (int i = heap.size; i < k; i++) {
    ids[i] = -1;
    top[i] = -INFINITY;
  }
}

}  // namespace
}  // namespace isobatch::ISOBATCH_UNIT
