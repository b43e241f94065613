//! C entry points of the launchers. Parameters travel as the POD structs of the op headers, whose layout the library tells.
//! Nothing throws across them: a message that finds no memory ends the process.
#pragma once

#include <cstdint>

#define DSPARK_C_ABI extern "C" __attribute__((visibility("default")))

//! Text: a line "<op> <bytes>" per op, then an indented line "<field> <offset> <bytes> <kind>" per field.
DSPARK_C_ABI char const* dspark_params_layout() noexcept;

//! Bytes of workspace for these parameters (pointers are not read); -1 when there is no such op.
DSPARK_C_ABI int64_t dspark_workspace_bytes(char const* op, void const* params) noexcept;

//! Launches `op` on `stream` (a cudaStream_t; null = default). 0 = launched; else a code, and `message` says why:
//! 1 to 999 an argument was refused, 1000 + n CUDA returned error n.
DSPARK_C_ABI int32_t dspark_launch(char const* op, void const* params, void* stream, char* message,
                                   int64_t message_bytes) noexcept;
