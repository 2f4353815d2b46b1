// CRC32C by registers of 512 bits.
#if defined(__x86_64__)

#include <immintrin.h>

#include "crc32c_kernels.h"
#include "target.h"

TSR_BEGIN_TARGET("avx512f,pclmul,vpclmulqdq")

#include "crc32c_x86.h"

namespace tsr {
namespace {

struct Avx512 : Crc32cInstructions {
  using Value = __m512i;
  static constexpr size_t kNbytes = sizeof(Value);
  static constexpr size_t kWordsPerFold = 0;
  static constexpr const Crc32cVariant* kShort = &kCrc32cSse42;

  static Value Load(const uint8_t* from) { return _mm512_loadu_si512(from); }
  static void Store(uint8_t* to, Value value) { _mm512_store_si512(to, value); }
  static void StorePastCache(uint8_t* to, Value value) {
    _mm512_stream_si512(reinterpret_cast<Value*>(to), value);
  }
  static void Pin(Value& value) { asm volatile("" : "+v"(value)); }
  static Value FromCrc(uint32_t crc) {
    return _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int32_t>(crc)));
  }
  static Value Factors(uint64_t low, uint64_t high) {
    const auto a = static_cast<int64_t>(low);
    const auto b = static_cast<int64_t>(high);
    return _mm512_set4_epi64(b, a, b, a);
  }
  static Value Xor(Value a, Value b) { return _mm512_xor_si512(a, b); }
  static Value Fold(Value sum, Value factors, Value next) {
    constexpr int kXor3 = 0x96;
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(sum, factors, 0x00),
                                     _mm512_clmulepi64_epi128(sum, factors, 0x11), next, kXor3);
  }
};

}  // namespace

constinit const Crc32cVariant kCrc32cAvx512 = {"vpclmulqdq-512", CpuLevel::kAvx512, Extend<Avx512>,
                                               Copy<Avx512>};

}  // namespace tsr

TSR_END_TARGET

#endif  // defined(__x86_64__)
