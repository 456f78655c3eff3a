// Steps that break a rule: refused before anything is read through a wrong index.
#include <cmath>
#include <functional>
#include <stdexcept>

#include "small_model.h"

namespace isobatch::testing {
namespace {

struct Change {
  const char* rule;  // part of the message
  std::function<void(Step&)> apply;
};

const Change kChanges[] = {
    {"tokens must be 1 to", [](Step& s) { s.arrays.tokens = 0; }},
    {"tokens must be 1 to", [](Step& s) { s.arrays.tokens = kMostTokens + 1; }},
    {"token rows must be 1 to", [](Step& s) { s.arrays.rows = kMostRows + 1; }},
    {"must begin with 0", [](Step& s) { s.row_starts[0] = 1; }},
    {"must ascend", [](Step& s) { s.row_starts[1] = -5; }},
    {"must end with the number of tokens", [](Step& s) { s.row_starts[2]++; }},
    {"in the vocabulary", [](Step& s) { s.token_ids[1] = kVocabulary; }},
    {"in the vocabulary", [](Step& s) { s.token_ids[1] = INT32_MIN; }},
    {"must not be negative", [](Step& s) { s.positions[0] = -1; }},
    {"lie in the context", [](Step& s) { s.positions[0] = INT32_MAX; }},
    {"must be consecutive", [](Step& s) { s.positions[1] = 7; }},
    {"must hold the blocks", [](Step& s) { for (int i = 0; i < 3; i++) s.positions[i] = 62 + i; }},
    {"lie in the pool", [](Step& s) { s.block_tables[0] = 80; }},
    {"lie in the pool", [](Step& s) { s.block_tables[0] = INT32_MIN; }},
    {"belong to one row alone", [](Step& s) { s.block_tables[4] = s.block_tables[0]; }},
    {"wanted positions must be indexes", [](Step& s) { s.wanted[1] = 1000; }},
    {"wanted positions must ascend", [](Step& s) { s.wanted[0] = s.wanted[1]; }},
    {"top_k must be 1 to", [](Step& s) { s.top_k[0] = 0; }},
    {"inverse temperatures", [](Step& s) { s.inverse_temperatures[0] = NAN; }},
    {"inverse temperatures", [](Step& s) { s.inverse_temperatures[0] = -1; }},
    {"quantiles", [](Step& s) { s.quantiles[1] = 1; }},
    {"quantiles", [](Step& s) { s.quantiles[1] = NAN; }},
    {"edit_starts", [](Step& s) { s.edit_starts[1] = -1; }},
    {"edit_starts must end", [](Step& s) { s.arrays.edit_count++; }},
};

std::string message_of(Engine& engine, const StepArrays& step) {
  try {
    engine.run(step);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "nothing";
}

}  // namespace

void test_wrong_steps() {
  const auto engine = make_engine({false, 32, 32, 80}, "scalar", 2);
  const std::vector<Row> rows{{{5, 6, 7, 8}, 60, 3}, {{9, 10, 11, 12}, 0, 2}};
  for (const Change& change : kChanges) {
    Random random(8);
    Step step(random, rows, false);
    change.apply(step);
    const std::string message = message_of(*engine, step.arrays);
    expect(message.find(change.rule) != std::string::npos, std::string("a step for '") + change.rule + "' gave: " + message);
  }
  Random random(8);
  Step step(random, rows, true);
  expect(message_of(*engine, step.arrays) == "nothing", "the step that was changed is right");
}

}  // namespace isobatch::testing
