// Whole steps: every unit, with any number of threads, against the reference on one.
#include "cpu_features.h"
#include "small_model.h"
#include "tables.h"

namespace isobatch::testing {
namespace {

constexpr ModelShape kShapes[] = {{false, 32, 32, 80}, {false, 16, 32, 80}, {true, 0, 0, 80}};

// A prefill of three rows, one of them long, then decode steps among which a fourth row arrives.
std::vector<std::vector<Row>> scenario(int long_prefill) {
  const auto blocks = [](int first, int count) {
    std::vector<int32_t> ids;
    for (int i = 0; i < count; i++) ids.push_back(first + count - 1 - i);
    return ids;
  };
  const std::vector<int32_t> a = blocks(0, 24), b = blocks(30, 3), c = blocks(40, 3), d = blocks(50, 24);
  const int n = long_prefill;
  return {{{a, 0, n}, {b, 0, 1}, {c, 0, 17}},
          {{a, n, 1}, {b, 1, 1}, {c, 17, 1}},
          {{d, 0, 9}, {a, n + 1, 1}, {c, 18, 3}},
          {{a, n + 2, 1}}};
}

struct Outcome {
  std::vector<std::unique_ptr<Step>> steps;
  std::vector<float> logits;
  std::vector<uint16_t> cache;
};

Outcome run_scenario(Engine& engine, const ModelShape& shape, int long_prefill) {
  Random random(9);
  Outcome outcome;
  for (const std::vector<Row>& rows : scenario(long_prefill)) {
    outcome.steps.push_back(std::make_unique<Step>(random, rows, outcome.steps.size() == 2));
    const Step& step = *outcome.steps.back();
    engine.run(step.arrays);
    outcome.logits.insert(outcome.logits.end(), engine.logits(), engine.logits() + step.wanted.size() * kVocabulary);
  }
  const EngineConfig& c = engine.config();
  std::vector<uint16_t> block((size_t)c.num_layers * 2 * c.num_kv_heads * c.block_size * c.head_dim);
  for (int i = 0; i < shape.num_blocks; i++) {
    engine.read_block(i, block.data());
    outcome.cache.insert(outcome.cache.end(), block.begin(), block.end());
  }
  return outcome;
}

bool equal(const Outcome& a, const Outcome& b) {
  bool same = same_bits(a.logits, b.logits) && same_bits(a.cache, b.cache);
  for (size_t i = 0; i < a.steps.size(); i++) same = same && a.steps[i]->results_equal(*b.steps[i]);
  return same;
}

void compare_units(const ModelShape& shape, int long_prefill) {
  const Outcome expected = run_scenario(*make_engine(shape, "reference", 1), shape, long_prefill);
  bool finite = true;
  for (const auto& step : expected.steps) {
    for (int32_t op : step->non_finite_ops) finite = finite && op == -1;
  }
  expect(finite, "the small model's values are finite");
  for (const char* unit : engine_units()) {
    for (int threads : {1, 2, 5}) {
      const auto engine = make_engine(shape, unit, threads);
      engine->set_flush_subnormals(threads == 2);
      expect(equal(expected, run_scenario(*engine, shape, long_prefill)),
             std::string(unit) + " with " + std::to_string(threads) + " threads, groups of " + std::to_string(shape.group));
    }
  }
}

// Logits that nobody asks for, and blocks that are cleared.
void prefill_without_logits() {
  const ModelShape& shape = kShapes[0];
  const auto engine = make_engine(shape, engine_units().back(), 3);
  Random random(4);
  Step step(random, {{{1, 2}, 0, 20}}, false);
  step.wanted.clear();
  step.edit_starts = {0};
  step.edit_ids.clear();
  step.edit_values.clear();
  step.connect();
  engine->run(step.arrays);
  expect(step.non_finite_ops[0] == -1, "a step without wanted positions");
  const int32_t cleared[] = {1, 2};
  engine->zero_blocks(cleared, 2);
  const EngineConfig& c = engine->config();
  std::vector<uint16_t> block((size_t)c.num_layers * 2 * c.num_kv_heads * c.block_size * c.head_dim, 1);
  engine->read_block(2, block.data());
  bool zero = true;
  for (uint16_t h : block) zero = zero && h == 0;
  expect(zero, "a cleared block is zero");
  engine->read_block(0, block.data());
  engine->write_block(2, block.data());
  std::vector<uint16_t> again(block.size());
  engine->read_block(2, again.data());
  expect(again == block, "a block can be put in another place");
}

// Rows that do not fill their last panel, and panels of every size.
void panels() {
  const ModelShape& shape = kShapes[0];
  for (int long_prefill : {14, 46, 62}) {  // steps of 32, 64 and 80 rows
    const Outcome expected = run_scenario(*make_engine(shape, "reference", 1), shape, long_prefill);
    for (const char* unit : engine_units()) {
      const auto engine = make_engine(shape, unit, 2);
      for (int most : {0, 1, 5, 8, 11, 16}) {
        engine->set_panel_limits({{3, 2}, {40, most}, {1000, most}});
        const auto cleared = run_scenario(*engine, shape, long_prefill);
        expect(equal(expected, cleared), std::string(unit) + " with panels of at most " + std::to_string(most) + " rows");
      }
    }
  }
}

void panel_limits_are_checked() {
  const auto engine = make_engine(kShapes[0], "scalar", 1);
  const std::vector<Engine::PanelLimit> wrong[] = {{{4, 17}}, {{4, -1}}, {{4, 8}, {4, 8}}, {{0, 8}}};
  for (const auto& limits : wrong) {
    bool refused = false;
    try {
      engine->set_panel_limits(limits);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    expect(refused, "wrong panel limits are refused");
  }
}

// Two callers of one engine take turns; two engines run beside each other.
void callers_take_turns() {
  const ModelShape& shape = kShapes[0];
  const Outcome expected = run_scenario(*make_engine(shape, "reference", 1), shape, 20);
  const auto shared = make_engine(shape, engine_units().back(), 2), other = make_engine(shape, "scalar", 2);
  Random random(3);
  Step first(random, {{{3}, 0, 5}}, false), second(random, {{{4}, 0, 6}}, false);
  std::thread beside([&] { expect(equal(expected, run_scenario(*other, shape, 20)), "an engine beside another"); });
  std::thread caller([&] {
    for (int i = 0; i < 10; i++) shared->run(first.arrays);
  });
  for (int i = 0; i < 10; i++) shared->run(second.arrays);
  caller.join();
  beside.join();
  expect(first.non_finite_ops[0] == -1 && second.non_finite_ops[0] == -1, "callers take turns");
}

}  // namespace

void test_engine() {
  compare_units(kShapes[0], 280);  // long enough for attention by chunks
  for (const ModelShape& shape : {kShapes[1], kShapes[2]}) compare_units(shape, 20);
  panels();
  panel_limits_are_checked();
  prefill_without_logits();
  callers_take_turns();
}

}  // namespace isobatch::testing
