// The Python module `_cpu`.
#include "bindings.h"

#include <nanobind/stl/string.h>

#include "cpu_features.h"
#include "engine.h"

namespace isobatch {
extern const char source_digest[];  // written by the build
}

NB_MODULE(_cpu, module) {
  module.attr("source_digest") = nanobind::str(isobatch::source_digest);
  module.def("unit_available", [](const std::string& name) { return isobatch::find_unit(name).available(); }, nanobind::arg("unit"),
             "Whether this processor and this build have the unit.");
  module.def("usable_cpus", &isobatch::usable_cpus, "CPUs of the affinity mask, limited by the control group's quota.");
  isobatch::bind_engine(module);
  isobatch::bind_float(module);
  isobatch::bind_linear(module);
  isobatch::bind_reference(module);
}
