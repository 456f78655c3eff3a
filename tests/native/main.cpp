// Compares every kernel table of this processor with the reference, bit for bit, and steps small models through the engine.
//
// Usage: native_tests [GROUP...]     all groups when none is named
#include <chrono>

#include "check.h"
#include "cpu_features.h"
#include "tables.h"

namespace {

using namespace isobatch::testing;

struct Group {
  const char* name;
  void (*run)();
};
constexpr Group kGroups[] = {{"quantize", test_quantize},     {"rope", test_rope},     {"attention", test_attention},
                             {"statistics", test_statistics}, {"linear", test_linear}, {"dense", test_dense},
                             {"float", test_float},           {"pool", test_pool},
                             {"engine", test_engine}, {"wrong_steps", test_wrong_steps}};

bool wanted(const Group& group, int count, char** names) {
  for (int i = 1; i < count; i++) {
    if (std::strcmp(names[i], group.name) == 0) return true;
  }
  return count < 2;
}

}  // namespace

int main(int count, char** names) {
  std::printf("tables:");
  for (const isobatch::RowOps* ops : row_tables()) std::printf(" %s", ops->name);
  std::printf("; linear:");
  for (const isobatch::LinearOps* ops : linear_tables()) std::printf(" %s", ops->name);
  std::printf("\n");
  int groups = 0;
  for (const Group& group : kGroups) {
    if (!wanted(group, count, names)) continue;
    groups++;
    const int before = checks_done();
    const auto start = std::chrono::steady_clock::now();
    group.run();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::printf("%-12s %6d checks %6.2f s\n", group.name, checks_done() - before, seconds.count());
    std::fflush(stdout);
  }
  if (groups == 0 || (count > 1 && groups != count - 1)) {
    std::printf("unknown group\n");
    return 2;
  }
  std::printf("%d checks, %d failed\n", checks_done(), checks_failed());
  return checks_failed() == 0 ? 0 : 1;
}
