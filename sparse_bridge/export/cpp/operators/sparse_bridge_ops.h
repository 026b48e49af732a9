// The operators of sparse_bridge for programs without Python, on the CPU.
//
// Link `sparse_bridge_ops` and call `sparse_bridge::load()` before a package runs.

#pragma once

#if defined(_WIN32)
#define SPARSE_BRIDGE_API __declspec(dllexport)
#else
#define SPARSE_BRIDGE_API __attribute__((visibility("default")))
#endif

namespace sparse_bridge {

// Registers the operators with torch. False where this process has them already, from Python or
// from another copy of this library: those serve. Calling it also keeps linkers from dropping the
// library, of which a program needs no other function.
SPARSE_BRIDGE_API bool load();

// What the last operator of this thread refused; empty if none did since this was asked, so that
// an error that comes from elsewhere has no words of an older one. torch 2.13 throws these words;
// where a release only throws the place of the call, they are here. They hold until the next call.
SPARSE_BRIDGE_API const char *last_error();

} // namespace sparse_bridge
