#pragma once
//! A team of real threads: what a block of GPU threads is to the shared algorithms, on the host.

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "dspark/team.h"

namespace dspark::test {

//! State that the ranks of one team share.
struct TeamShared {
    explicit TeamShared(int count) : size(count), slot(static_cast<size_t>(count)) {}

    void arrive() {
        std::unique_lock<std::mutex> lock(mutex);
        uint64_t const mine = generation;
        if (++arrived == size) {
            arrived = 0;
            ++generation;
            lock.unlock();
            released.notify_all();
            return;
        }
        released.wait(lock, [&] { return generation != mine; });
    }

    int size;
    std::vector<uint64_t> slot;
    std::mutex mutex;
    std::condition_variable released;
    int arrived = 0;
    uint64_t generation = 0;
};

class ThreadTeam {
public:
    ThreadTeam(TeamShared* shared, int rank) : shared_(shared), rank_(rank) {}
    int rank() const { return rank_; }
    int size() const { return shared_->size; }
    void sync() const { shared_->arrive(); }
    uint64_t maxU64(uint64_t x) const {
        return reduce(x, [](uint64_t a, uint64_t b) { return a < b ? b : a; });
    }
    uint64_t addU64(uint64_t x) const {
        return reduce(x, [](uint64_t a, uint64_t b) { return a + b; });
    }
    uint64_t exclusiveAddU64(uint64_t x, uint64_t* total) const {
        publish(x);
        uint64_t before = 0, all = 0;
        for (int rank = 0; rank < size(); ++rank) {
            if (rank == rank_) before = all;
            all += shared_->slot[static_cast<size_t>(rank)];
        }
        sync();
        *total = all;
        return before;
    }

private:
    void publish(uint64_t x) const {
        shared_->slot[static_cast<size_t>(rank_)] = x;
        sync();
    }
    template <class Combine>
    uint64_t reduce(uint64_t x, Combine const& combine) const {
        publish(x);
        uint64_t result = shared_->slot[0];
        for (size_t rank = 1; rank < shared_->slot.size(); ++rank) result = combine(result, shared_->slot[rank]);
        sync();
        return result;
    }

    TeamShared* shared_;
    int rank_;
};

//! Run `body(team)` on every rank of a team of `size` threads.
inline void runTeam(int size, std::function<void(ThreadTeam const&)> const& body) {
    TeamShared shared(size);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
        threads.emplace_back([&shared, &body, rank] { body(ThreadTeam(&shared, rank)); });
    }
    for (std::thread& thread : threads) thread.join();
}

}  // namespace dspark::test
