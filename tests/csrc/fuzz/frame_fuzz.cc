// Frames: what is decoded is encoded as the same bytes. Their checksum is made right here, as no
// fuzzer would find it.
#include <array>
#include <cstring>

#include "crc32c.h"
#include "fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t nbytes) {
  using namespace tsr;
  constexpr size_t kSummedNbytes = kFrameNbytes - sizeof(uint32_t);
  for (; nbytes >= kSummedNbytes; data += kSummedNbytes, nbytes -= kSummedNbytes) {
    std::array<uint8_t, kFrameNbytes> bytes;
    const uint32_t crc = Crc32c(0, data, kSummedNbytes);
    std::memcpy(bytes.data(), data, kSummedNbytes);
    std::memcpy(bytes.data() + kSummedNbytes, &crc, sizeof(crc));
    Frame frame;
    if (!DecodeFrame(bytes, &frame).ok()) continue;
    Check(std::memcmp(Encoded(frame).data(), bytes.data(), kFrameNbytes) == 0,
          "frames have one encoding");
  }
  return 0;
}
