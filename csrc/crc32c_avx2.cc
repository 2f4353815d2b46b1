// CRC32C by registers of 256 bits.
#if defined(__x86_64__)

#include <immintrin.h>

#include "crc32c_kernels.h"
#include "target.h"

TSR_BEGIN_TARGET("avx2,pclmul,vpclmulqdq")

#include "crc32c_x86.h"

namespace tsr {
namespace {

struct Avx2 : Crc32cInstructions {
  using Value = __m256i;
  static constexpr size_t kNbytes = sizeof(Value);
  static constexpr size_t kWordsPerFold = 1;
  static constexpr const Crc32cVariant* kShort = &kCrc32cSse42;

  static Value Load(const uint8_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const Value*>(from));
  }
  static void Store(uint8_t* to, Value value) {
    _mm256_store_si256(reinterpret_cast<Value*>(to), value);
  }
  static void StorePastCache(uint8_t* to, Value value) {
    _mm256_stream_si256(reinterpret_cast<Value*>(to), value);
  }
  static void Pin(Value& value) { asm volatile("" : "+x"(value)); }
  static Value FromCrc(uint32_t crc) {
    return _mm256_zextsi128_si256(_mm_cvtsi32_si128(static_cast<int32_t>(crc)));
  }
  static Value Factors(uint64_t low, uint64_t high) {
    return _mm256_broadcastsi128_si256(
        _mm_set_epi64x(static_cast<int64_t>(high), static_cast<int64_t>(low)));
  }
  static Value Xor(Value a, Value b) { return _mm256_xor_si256(a, b); }
  static Value Fold(Value sum, Value factors, Value next) {
    return Xor(Xor(_mm256_clmulepi64_epi128(sum, factors, 0x00),
                   _mm256_clmulepi64_epi128(sum, factors, 0x11)),
               next);
  }
};

}  // namespace

constinit const Crc32cVariant kCrc32cAvx2 = {"vpclmulqdq-256", CpuLevel::kAvx2, Extend<Avx2>,
                                             Copy<Avx2>};

}  // namespace tsr

TSR_END_TARGET

#endif  // defined(__x86_64__)
