#include "cpu.h"

#include <algorithm>
#include <cstdlib>
#include <span>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace tsr {
namespace {

constexpr const char* kVariable = "TSR_CPU";

#if defined(__x86_64__)

// Not every clang knows F16C by name.
bool HasF16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

// Asks for the operating system's part as well: whether it keeps the registers.
CpuLevel BestLevel() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("sse4.2") || !__builtin_cpu_supports("pclmul")) {
    return CpuLevel::kPortable;
  }
  if (!__builtin_cpu_supports("avx2") || !HasF16c()) return CpuLevel::kSse42;
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has_avx512 ? CpuLevel::kAvx512 : CpuLevel::kAvx2;
}

constexpr CpuLevel kLevels[] = {CpuLevel::kAvx512, CpuLevel::kAvx2, CpuLevel::kSse42,
                                CpuLevel::kPortable};

#elif defined(__aarch64__)

CpuLevel BestLevel() {
  constexpr unsigned long kNeeded = HWCAP_PMULL | HWCAP_CRC32;
  return (::getauxval(AT_HWCAP) & kNeeded) == kNeeded ? CpuLevel::kPmull : CpuLevel::kPortable;
}

constexpr CpuLevel kLevels[] = {CpuLevel::kPmull, CpuLevel::kPortable};

#else

CpuLevel BestLevel() { return CpuLevel::kPortable; }

constexpr CpuLevel kLevels[] = {CpuLevel::kPortable};

#endif

std::string NamesOf(std::span<const CpuLevel> levels) {
  std::string names;
  for (const CpuLevel level : levels) {
    if (!names.empty()) names += ", ";
    names += NameOf(level);
  }
  return names;
}

struct Choice {
  CpuLevel level;
  Status status;
};

const Choice& Chosen() {
  static const Choice chosen = [] {
    Choice choice{CpuLevels().front(), Status()};
    if (const char* text = std::getenv(kVariable)) {
      choice.status = ParseCpuLevel(text, &choice.level);
    }
    return choice;
  }();
  return chosen;
}

}  // namespace

std::string_view NameOf(CpuLevel level) {
  switch (level) {
    case CpuLevel::kPmull:
      return "pmull";
    case CpuLevel::kSse42:
      return "sse4.2";
    case CpuLevel::kAvx2:
      return "avx2";
    case CpuLevel::kAvx512:
      return "avx512";
    case CpuLevel::kPortable:
      break;
  }
  return "portable";
}

const std::vector<CpuLevel>& CpuLevels() {
  static const std::vector<CpuLevel> levels(std::ranges::find(kLevels, BestLevel()),
                                            std::ranges::end(kLevels));
  return levels;
}

bool HasVpclmulqdq() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("vpclmulqdq");
#else
  return false;
#endif
}

Status ParseCpuLevel(std::string_view text, CpuLevel* out) {
  const auto& levels = CpuLevels();
  const auto found = std::ranges::find(levels, text, NameOf);
  if (found == levels.end()) {
    return Status(Code::kInvalid, std::string(kVariable) + " is '" + std::string(text) +
                                      "', expected a level that this CPU has: " + NamesOf(levels));
  }
  *out = *found;
  return Status();
}

CpuLevel UsedCpuLevel() { return Chosen().level; }

Status CheckCpuLevel() { return Chosen().status; }

}  // namespace tsr
