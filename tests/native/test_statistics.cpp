// Row statistics: every table against the reference.
#include <cmath>

#include "check.h"
#include "tables.h"

namespace isobatch::testing {
namespace {

struct Results {
  StatisticsResult one{};
  std::vector<int32_t> ids;
  std::vector<float> top, weights;

  explicit Results(int top_k) : ids(top_k), top(top_k), weights(top_k) {
    one.top_ids = ids.data();
    one.top_logits = top.data();
    one.top_weights = weights.data();
  }
  bool equals(const Results& other) const {
    const std::vector<float> a{one.max_logit, one.normalizer}, b{other.one.max_logit, other.one.normalizer};
    return one.argmax_id == other.one.argmax_id && one.quantile_id == other.one.quantile_id && same_bits(a, b) &&
           ids == other.ids && same_bits(top, other.top) && same_bits(weights, other.weights);
  }
};

std::vector<float> random_logits(Random& random, int V) {
  const int kind = random.below(5);
  std::vector<float> logits = random_values(random, V, kind == 0 ? 60.0f : 8.0f);
  for (float& x : logits) {
    if (kind == 1) x = (float)(int)x;  // many ties
    if (kind == 2) x = 3.5f;
    if (kind == 3) x = random.once_in(3) ? -40.0f : -std::fabs(random.pick(exp_edges()));
    x = x + 0.0f;
  }
  if (kind == 3) logits[random.below(V)] = 0;  // the largest, so that the others are arguments of exp as they are
  return logits;
}

void statistics_case(Random& random, const RowOps* ops, bool flush, int V) {
  static const float kTemperatures[] = {0.0f, 0.5f, 1.0f, 1.0f, 1.25f, 100.0f};
  static const float kQuantiles[] = {0.0f, 0.25f, 0.999f, 1.0f - 0x1p-24f};
  static const int kTop[] = {0, 1, 2, 5, 17, 64, 70};
  std::vector<float> logits = random_logits(random, V);
  std::vector<int32_t> edit_ids;
  std::vector<float> edit_values;
  for (int i = random.below(4); i > 0; i--) {
    edit_ids.push_back(random.below(V));
    edit_values.push_back(random.once_in(3) ? 0x1p-61f : random.uniform(-200, 20));
  }
  StatisticsArgs args{};
  args.normalizer = random.once_in(2);
  args.quantile = random.once_in(2);
  args.top_k = random.pick(kTop);
  args.inverse_temperature = random.pick(kTemperatures);
  args.u = random.once_in(2) ? random.uniform(0, 0.99999f) : random.pick(kQuantiles);
  args.edit_ids = edit_ids.data();
  args.edit_values = edit_values.data();
  args.num_edits = (int)edit_ids.size();
  std::vector<float> edited = logits, scratch(V);
  Results expected(args.top_k), got(args.top_k);
  reference_row_ops()->statistics(edited.data(), V, args, expected.one, nullptr);
  ScopedFloatMode mode(flush);
  ops->statistics(logits.data(), V, args, got.one, scratch.data());
  expect(got.equals(expected) && same_bits(logits, edited), std::string(ops->name) + (flush ? " flushed" : "") +
                                                                " statistics of " + std::to_string(V) + " logits, top " +
                                                                std::to_string(args.top_k));
}

// Nothing is promised about such a row's numbers, but every id must lie in the vocabulary.
void non_finite_case(Random& random, const RowOps* ops, int V) {
  std::vector<float> logits = random_logits(random, V), scratch(V);
  for (float& x : logits) {
    if (random.once_in(3)) x = random.once_in(2) ? NAN : -INFINITY;
  }
  spoil(random, logits);
  StatisticsArgs args{};
  args.normalizer = args.quantile = true;
  args.top_k = 5;
  args.inverse_temperature = 1;
  args.u = 0.5f;
  Results got(args.top_k);
  ops->statistics(logits.data(), V, args, got.one, scratch.data());
  bool inside = got.one.argmax_id >= 0 && got.one.argmax_id < V && got.one.quantile_id >= 0 && got.one.quantile_id < V;
  for (int32_t id : got.ids) inside = inside && id >= -1 && id < V;
  expect(inside, std::string(ops->name) + " ids of a row that is not finite");
}

}  // namespace

void test_statistics() {
  Random random(4);
  for (const RowOps* ops : row_tables()) {
    for (int V : {1, 2, 3, 63, 64, 65, 130, 1000, 1023, 1024, 1025, 2049, 3000}) {
      for (bool flush : {false, true}) {
        for (int i = 0; i < 20; i++) statistics_case(random, ops, flush, V);
      }
      for (int i = 0; i < 4; i++) non_finite_case(random, ops, V);
    }
  }
}

}  // namespace isobatch::testing
