// Compile what stands between TARGET_BEGIN and TARGET_END for one instruction set, with g++ and
// with clang. g++ instantiates templates with the options in force at the end of the file, so its
// options are never popped: TARGET_END must be the last line.
#pragma once
#define TARGET_PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define TARGET_BEGIN(isa) \
  TARGET_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define TARGET_END TARGET_PRAGMA(clang attribute pop)
#else
// g++ 12 takes the deliberately undefined vectors inside its own intrinsics for uninitialised ones.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#define TARGET_BEGIN(isa) TARGET_PRAGMA(GCC target(isa))
#define TARGET_END
#endif
