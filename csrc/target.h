// Parts of a file that are compiled for more than the baseline of the architecture.
#pragma once

// What stands between the two may only run where the CPU has those extensions. No header of others
// is included there: functions that it defines could replace those that run everywhere.
#define TSR_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define TSR_BEGIN_TARGET(extensions) \
  TSR_PRAGMA(clang attribute push(__attribute__((target(extensions))), apply_to = function))
#define TSR_END_TARGET TSR_PRAGMA(clang attribute pop)
#else
#define TSR_BEGIN_TARGET(extensions) \
  TSR_PRAGMA(GCC push_options)       \
  TSR_PRAGMA(GCC target(extensions))
#define TSR_END_TARGET TSR_PRAGMA(GCC pop_options)
#endif
