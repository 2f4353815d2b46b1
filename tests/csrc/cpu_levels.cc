// Prints the levels that this CPU has, the best first, for those who test the kernels of each.
#include <iostream>

#include "cpu.h"

int main() {
  for (const tsr::CpuLevel level : tsr::CpuLevels()) std::cout << tsr::NameOf(level) << '\n';
}
