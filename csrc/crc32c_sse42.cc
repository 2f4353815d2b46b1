// CRC32C by registers of 128 bits.
#if defined(__x86_64__)

#include <immintrin.h>

#include "crc32c_kernels.h"
#include "target.h"

TSR_BEGIN_TARGET("sse4.2,pclmul")

#include "crc32c_x86.h"

namespace tsr {
namespace {

struct Sse42 : Crc32cInstructions {
  using Value = __m128i;
  static constexpr size_t kNbytes = sizeof(Value);
  static constexpr size_t kWordsPerFold = 2;
  static constexpr const Crc32cVariant* kShort = nullptr;

  static Value Load(const uint8_t* from) {
    return _mm_loadu_si128(reinterpret_cast<const Value*>(from));
  }
  static void Store(uint8_t* to, Value value) {
    _mm_store_si128(reinterpret_cast<Value*>(to), value);
  }
  static void StorePastCache(uint8_t* to, Value value) {
    _mm_stream_si128(reinterpret_cast<Value*>(to), value);
  }
  static void Pin(Value& value) { asm volatile("" : "+x"(value)); }
  static Value FromCrc(uint32_t crc) { return _mm_cvtsi32_si128(static_cast<int32_t>(crc)); }
  static Value Factors(uint64_t low, uint64_t high) {
    return _mm_set_epi64x(static_cast<int64_t>(high), static_cast<int64_t>(low));
  }
  static Value Xor(Value a, Value b) { return _mm_xor_si128(a, b); }
  static Value Fold(Value sum, Value factors, Value next) {
    return Xor(
        Xor(_mm_clmulepi64_si128(sum, factors, 0x00), _mm_clmulepi64_si128(sum, factors, 0x11)),
        next);
  }
};

}  // namespace

constinit const Crc32cVariant kCrc32cSse42 = {"pclmulqdq", CpuLevel::kSse42, Extend<Sse42>,
                                              Copy<Sse42>};

}  // namespace tsr

TSR_END_TARGET

#endif  // defined(__x86_64__)
