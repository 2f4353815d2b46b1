// Which instructions the kernels use: the best that this CPU has, or what TSR_CPU asks for.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "status.h"

namespace tsr {

// What a kernel may use beyond the baseline of its architecture; ascending, each holds the former.
enum class CpuLevel : uint8_t {
  kPortable,  // what every CPU of the architecture has
  kPmull,     // aarch64: PMULL and CRC32
  kSse42,     // x86-64: SSE4.2 and PCLMULQDQ
  kAvx2,      // AVX2 and F16C
  kAvx512,    // AVX-512 F, BW, DQ and VL
};

// As TSR_CPU has it: "avx512", "avx2", "sse4.2", "pmull" or "portable".
std::string_view NameOf(CpuLevel level);

// Levels that this CPU has, the best first.
const std::vector<CpuLevel>& CpuLevels();
// Whether it has VPCLMULQDQ. There are CPUs of both highest levels with it and without it.
bool HasVpclmulqdq();

// The level that `text` names; kInvalid where it names none, or one that this CPU lacks.
Status ParseCpuLevel(std::string_view text, CpuLevel* out);

// The level that the kernels use: the best, unless TSR_CPU named another when it was asked first.
CpuLevel UsedCpuLevel();
// kInvalid where TSR_CPU is set to what ParseCpuLevel() refuses. Who starts work asks: the kernels
// have no way to fail, and use the best level then.
Status CheckCpuLevel();

}  // namespace tsr
