//! Runs CUDA kernel sources on the host, for tests: every thread of a block is a fiber, blocks run one after another.
//!
//! What it proves: the algorithm of a kernel, its barriers, and its memory accesses. Threads run one at a time until they
//! wait; the order of threads and of blocks is chosen by setOrder, so a result that depends on a missing barrier differs
//! between orders. Shared memory is poisoned before every block and ends at a guard page, as do arrays from
//! simt_allocate; an access behind either ends the launch with an error that names block and thread.
//! What it cannot show: weak memory ordering between blocks, timing, register use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace simt {

struct Index3 {
    unsigned x, y, z;
};

extern Index3 thread_index, block_index, block_size, grid_size;

unsigned char* sharedMemory();
void syncThreads();
void syncWarp(unsigned mask);

//! Publishes `word`, waits for every lane of `mask`, returns the word of lane `source`.
std::uint64_t exchange(unsigned mask, std::uint64_t word, int source);

//! Bit per lane of `mask` whose predicate is not zero.
unsigned ballot(unsigned mask, bool predicate);

//! D = A B + C of mma.m16n8k16 with the documented fragment layout; elements are already floats.
//! a: 8 values, b: 4 values, c: 4 values of this lane.
void mma16816(float* c, float const* a, float const* b);

enum class Outcome { kOk, kOutOfBounds, kDeadlock, kBadCollective };

//! Runs body once per thread of the grid.
Outcome run(std::function<void()> const& body, Index3 grid, Index3 block, std::size_t shared_bytes);

char const* lastError();

}  // namespace simt

extern "C" {
//! 0: ascending threads and blocks; 1: descending; otherwise shuffled anew at every turn with this seed.
void simt_set_order(unsigned seed);
//! `bytes` of memory that end at a guard page (up to the alignment of 16), filled with 0x7f; null when out of memory.
void* simt_allocate(std::size_t bytes);
void simt_free(void* memory, std::size_t bytes);
char const* simt_last_error();
}
