// CRC32C by registers of 128 bits on aarch64.
#if defined(__aarch64__)

#include <arm_acle.h>
#include <arm_neon.h>

#include "crc32c_kernels.h"
#include "target.h"

TSR_BEGIN_TARGET("+crc+crypto")

#include "crc32c_fold.h"

namespace tsr {
namespace {

struct Pmull {
  using Value = uint64x2_t;
  static constexpr size_t kNbytes = sizeof(Value);
  static constexpr size_t kWordsPerFold = 1;
  static constexpr const Crc32cVariant* kShort = nullptr;

  static Value Load(const uint8_t* from) { return vreinterpretq_u64_u8(vld1q_u8(from)); }
  static void Store(uint8_t* to, Value value) { vst1q_u8(to, vreinterpretq_u8_u64(value)); }
  static void StorePastCache(uint8_t* to, Value value) { Store(to, value); }
  static void Pin(Value& value) { asm volatile("" : "+w"(value)); }
  static Value FromCrc(uint32_t crc) { return vsetq_lane_u64(crc, vdupq_n_u64(0), 0); }
  static Value Factors(uint64_t low, uint64_t high) {
    return vcombine_u64(vcreate_u64(low), vcreate_u64(high));
  }
  static Value Xor(Value a, Value b) { return veorq_u64(a, b); }
  static Value Fold(Value sum, Value factors, Value next) {
    const poly64x2_t a = vreinterpretq_p64_u64(sum);
    const poly64x2_t b = vreinterpretq_p64_u64(factors);
    const poly128_t low = vmull_p64(vgetq_lane_p64(a, 0), vgetq_lane_p64(b, 0));
    return Xor(Xor(vreinterpretq_u64_p128(low), vreinterpretq_u64_p128(vmull_high_p64(a, b))),
               next);
  }
  static uint32_t ExtendByWord(uint32_t crc, uint64_t word) { return __crc32cd(crc, word); }
  static uint32_t ExtendByByte(uint32_t crc, uint8_t byte) { return __crc32cb(crc, byte); }
  static uint32_t MoveAhead(uint32_t crc, uint64_t factor) {
    const poly128_t product = vmull_p64(crc, factor);
    return ExtendByWord(0, vgetq_lane_u64(vreinterpretq_u64_p128(product), 0));
  }
};

}  // namespace

constinit const Crc32cVariant kCrc32cPmull = {"pmull", CpuLevel::kPmull, Extend<Pmull>,
                                              Copy<Pmull>};

}  // namespace tsr

TSR_END_TARGET

#endif  // defined(__aarch64__)
