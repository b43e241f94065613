//! Scheduler of the host shim; see include/simt.h.
#include "simt.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

#if defined(__x86_64__)
// Saves the callee-saved registers on the current stack and continues on the other one.
asm(R"(
.text
.globl simt_switch_stack
.type simt_switch_stack, @function
simt_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size simt_switch_stack, .-simt_switch_stack
)");
extern "C" void simt_switch_stack(void** save, void* load);
#else
#include <ucontext.h>
#endif

namespace simt {

Index3 thread_index, block_index, block_size, grid_size;

namespace {

constexpr std::size_t kStackBytes = 96 * 1024;
constexpr std::size_t kSharedCapacity = 256 * 1024;

enum class State { kReady, kAtBlockBarrier, kAtWarpBarrier, kDone };

#if defined(__x86_64__)
struct Context {
    void* stack_pointer = nullptr;
};
void switchTo(Context& from, Context& to) { simt_switch_stack(&from.stack_pointer, to.stack_pointer); }
#else
struct Context {
    ucontext_t context;
};
void switchTo(Context& from, Context& to) { swapcontext(&from.context, &to.context); }
#endif

struct Fiber {
    Context context;
    State state;
    unsigned wait_mask;
    Index3 index;
};

struct Machine {
    std::vector<Fiber> fibers;
    unsigned char* stacks = nullptr;
    std::size_t stack_count = 0;
    unsigned char* shared_end = nullptr;
    unsigned char* shared = nullptr;
    std::vector<std::uint64_t> words;  // exchange slots, one per thread
    Context scheduler;
    std::function<void()> const* body = nullptr;
    int current = -1;
    int alive = 0;
    int at_block_barrier = 0;
    unsigned order = 0;
    std::uint64_t random = 0;
    Outcome outcome = Outcome::kOk;
    char error[256] = "";
};

Machine m;

void fail(Outcome outcome, char const* what) {
    m.outcome = outcome;
    std::snprintf(m.error, sizeof(m.error), "%s in block (%u, %u, %u), thread (%u, %u, %u)", what, block_index.x,
                  block_index.y, block_index.z, thread_index.x, thread_index.y, thread_index.z);
}

void yieldToScheduler() { switchTo(m.fibers[static_cast<std::size_t>(m.current)].context, m.scheduler); }

void releaseBlockBarrier() {
    if (m.alive > 0 && m.at_block_barrier == m.alive) {
        for (Fiber& fiber : m.fibers) {
            if (fiber.state == State::kAtBlockBarrier) fiber.state = State::kReady;
        }
        m.at_block_barrier = 0;
    }
}

void fiberMain() {
    (*m.body)();
    Fiber& fiber = m.fibers[static_cast<std::size_t>(m.current)];
    fiber.state = State::kDone;
    --m.alive;
    releaseBlockBarrier();
    yieldToScheduler();
    std::abort();  // a finished fiber is never resumed
}

#if !defined(__x86_64__)
void fiberEntry() { fiberMain(); }
#endif

void prepare(Fiber& fiber, std::size_t slot) {
    unsigned char* const base = m.stacks + slot * kStackBytes;
#if defined(__x86_64__)
    auto* top = reinterpret_cast<std::uint64_t*>(base + kStackBytes);
    *--top = 0;  // keeps the stack 16-byte aligned at entry
    *--top = reinterpret_cast<std::uint64_t>(&fiberMain);
    for (int saved = 0; saved < 6; ++saved) *--top = 0;
    fiber.context.stack_pointer = top;
#else
    getcontext(&fiber.context.context);
    fiber.context.context.uc_stack.ss_sp = base;
    fiber.context.context.uc_stack.ss_size = kStackBytes;
    fiber.context.context.uc_link = nullptr;
    makecontext(&fiber.context.context, fiberEntry, 0);
#endif
}

// Runs on the faulting fiber's stack: leaves it for good.
void onFault(int, siginfo_t* info, void*) {
    if (m.current < 0) {
        std::signal(SIGSEGV, SIG_DFL);
        return;
    }
    char what[96];
    std::snprintf(what, sizeof(what), "out-of-bounds access at address %p", info->si_addr);
    fail(Outcome::kOutOfBounds, what);
    Context abandoned;
    switchTo(abandoned, m.scheduler);
}

std::uint64_t nextRandom() {
    m.random = m.random * 6364136223846793005u + 1442695040888963407u;
    return m.random >> 33;
}

void fillOrder(std::vector<int>& order, int count) {
    order.resize(static_cast<std::size_t>(count));
    for (int index = 0; index < count; ++index) {
        order[static_cast<std::size_t>(index)] = m.order == 1 ? count - 1 - index : index;
    }
    if (m.order > 1) {
        for (int index = count - 1; index > 0; --index) {
            std::swap(order[static_cast<std::size_t>(index)],
                      order[nextRandom() % (static_cast<std::uint64_t>(index) + 1)]);
        }
    }
}

void runBlock() {
    int const count = static_cast<int>(block_size.x * block_size.y * block_size.z);
    m.fibers.resize(static_cast<std::size_t>(count));
    m.words.assign(static_cast<std::size_t>(count), 0x7f7f7f7f7f7f7f7fu);
    m.alive = count;
    m.at_block_barrier = 0;
    std::memset(m.shared, 0xcb, static_cast<std::size_t>(m.shared_end - m.shared));
    for (int index = 0; index < count; ++index) {
        Fiber& fiber = m.fibers[static_cast<std::size_t>(index)];
        unsigned const flat = static_cast<unsigned>(index);
        fiber.state = State::kReady;
        fiber.index = {flat % block_size.x, flat / block_size.x % block_size.y, flat / (block_size.x * block_size.y)};
        prepare(fiber, static_cast<std::size_t>(index));
    }
    std::vector<int> order;
    while (m.alive > 0 && m.outcome == Outcome::kOk) {
        fillOrder(order, count);
        bool progress = false;
        // Shuffled turns leave out half of the warps, so that warps drift apart as far as barriers let them.
        std::uint64_t const resting = m.order > 1 ? nextRandom() : 0;
        for (int index : order) {
            Fiber& fiber = m.fibers[static_cast<std::size_t>(index)];
            if (fiber.state != State::kReady) continue;
            progress = true;
            if (resting >> (index >> 5) & 1u) continue;
            m.current = index;
            thread_index = fiber.index;
            switchTo(m.scheduler, fiber.context);
            m.current = -1;
            if (m.outcome != Outcome::kOk) return;
        }
        if (!progress) {
            fail(Outcome::kDeadlock, "deadlock: a barrier or warp collective that not every thread reaches");
            return;
        }
    }
}

int firstOfWarp(int index) { return index & ~31; }

// Waits until every lane of `mask` waits too. A lane that has ended can never arrive.
void waitForWarp(unsigned mask) {
    int const first = firstOfWarp(m.current);
    Fiber& self = m.fibers[static_cast<std::size_t>(m.current)];
    self.wait_mask = mask;
    self.state = State::kAtWarpBarrier;
    bool complete = true;
    for (int lane = 0; lane < 32; ++lane) {
        if (!(mask >> lane & 1u)) continue;
        if (first + lane >= static_cast<int>(m.fibers.size()) ||
            m.fibers[static_cast<std::size_t>(first + lane)].state == State::kDone) {
            fail(Outcome::kBadCollective, "warp collective whose mask names a lane that has ended");
            yieldToScheduler();
        }
        Fiber const& other = m.fibers[static_cast<std::size_t>(first + lane)];
        complete = complete && other.state == State::kAtWarpBarrier && other.wait_mask == mask;
    }
    if (complete) {
        for (int lane = 0; lane < 32; ++lane) {
            if (mask >> lane & 1u) m.fibers[static_cast<std::size_t>(first + lane)].state = State::kReady;
        }
    }
    yieldToScheduler();
}

}  // namespace

unsigned char* sharedMemory() { return m.shared; }

void syncThreads() {
    Fiber& self = m.fibers[static_cast<std::size_t>(m.current)];
    self.state = State::kAtBlockBarrier;
    ++m.at_block_barrier;
    releaseBlockBarrier();
    yieldToScheduler();
}

void syncWarp(unsigned mask) { waitForWarp(mask); }

std::uint64_t exchange(unsigned mask, std::uint64_t word, int source) {
    int const first = firstOfWarp(m.current);
    m.words[static_cast<std::size_t>(m.current)] = word;
    waitForWarp(mask);
    if (!(mask >> source & 1u)) fail(Outcome::kBadCollective, "shuffle from a lane outside the mask");
    std::uint64_t const result = m.words[static_cast<std::size_t>(first + source)];
    waitForWarp(mask);
    return result;
}

unsigned ballot(unsigned mask, bool predicate) {
    int const first = firstOfWarp(m.current);
    m.words[static_cast<std::size_t>(m.current)] = predicate ? 1 : 0;
    waitForWarp(mask);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) {
        if ((mask >> lane & 1u) && m.words[static_cast<std::size_t>(first + lane)] != 0) bits |= 1u << lane;
    }
    waitForWarp(mask);
    return bits;
}

void mma16816(float* c, float const* a, float const* b) {
    // Fragments: lane = 4 * group + member. a[2h + p + 4k]: row group + 8h, column 2 * member + p + 8k (h, p, k in {0, 1}).
    // b[p + 2k]: row 2 * member + p + 8k, column group. c[p + 2h]: row group + 8h, column 2 * member + p.
    static float block_a[1024][8], block_b[1024][4];
    int const lane = m.current & 31;
    std::memcpy(block_a[m.current], a, sizeof(block_a[0]));
    std::memcpy(block_b[m.current], b, sizeof(block_b[0]));
    float const(*lanes_a)[8] = block_a + firstOfWarp(m.current);
    float const(*lanes_b)[4] = block_b + firstOfWarp(m.current);
    waitForWarp(0xffffffffu);
    int const group = lane >> 2, member = lane & 3;
    float sums[4];
    for (int h = 0; h < 2; ++h) {
        for (int p = 0; p < 2; ++p) {
            int const column = 2 * member + p;
            float sum = c[p + 2 * h];
            for (int k = 0; k < 16; ++k) {
                int const half = k >> 3, pair = (k & 7) >> 1, parity = k & 1;
                float const left = lanes_a[4 * group + pair][2 * h + parity + 4 * half];
                float const right = lanes_b[4 * column + pair][parity + 2 * half];
                sum += left * right;
            }
            sums[p + 2 * h] = sum;
        }
    }
    waitForWarp(0xffffffffu);
    std::memcpy(c, sums, sizeof(sums));
}

Outcome run(std::function<void()> const& body, Index3 grid, Index3 block, std::size_t shared_bytes) {
    std::size_t const threads = static_cast<std::size_t>(block.x) * block.y * block.z;
    if (m.stack_count < threads) {
        if (m.stacks) munmap(m.stacks, m.stack_count * kStackBytes);
        m.stacks = static_cast<unsigned char*>(mmap(nullptr, threads * kStackBytes, PROT_READ | PROT_WRITE,
                                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        m.stack_count = threads;
    }
    if (!m.shared_end) {
        std::size_t const page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
        auto* const base = static_cast<unsigned char*>(mmap(nullptr, kSharedCapacity + page, PROT_READ | PROT_WRITE,
                                                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        m.shared_end = base + kSharedCapacity;
        mprotect(m.shared_end, page, PROT_NONE);
    }
    m.shared = m.shared_end - (shared_bytes + 15) / 16 * 16;
    m.body = &body;
    m.outcome = Outcome::kOk;
    m.random = m.order;
    block_size = block;
    grid_size = grid;

    struct sigaction action = {}, previous = {};
    action.sa_sigaction = onFault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, &previous);
    std::vector<int> order;
    fillOrder(order, static_cast<int>(grid.x * grid.y * grid.z));
    for (int index : order) {
        unsigned const flat = static_cast<unsigned>(index);
        block_index = {flat % grid.x, flat / grid.x % grid.y, flat / (grid.x * grid.y)};
        runBlock();
        if (m.outcome != Outcome::kOk) break;
    }
    m.current = -1;
    sigaction(SIGSEGV, &previous, nullptr);
    return m.outcome;
}

char const* lastError() { return m.error; }

}  // namespace simt

extern "C" {

void simt_set_order(unsigned seed) { simt::m.order = seed; }

void* simt_allocate(std::size_t bytes) {
    std::size_t const page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    std::size_t const body = (bytes + page - 1) / page * page;
    void* const mapping = mmap(nullptr, body + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) return nullptr;
    unsigned char* const base = static_cast<unsigned char*>(mapping) + page;
    mprotect(base, body, PROT_READ | PROT_WRITE);
    std::memset(base, 0x7f, body);
    return base + body - (bytes + 15) / 16 * 16;
}

void simt_free(void* memory, std::size_t bytes) {
    std::size_t const page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    std::size_t const body = (bytes + page - 1) / page * page;
    unsigned char* const end = static_cast<unsigned char*>(memory) + (bytes + 15) / 16 * 16;
    munmap(end - body - page, body + 2 * page);
}

char const* simt_last_error() { return simt::lastError(); }
}
