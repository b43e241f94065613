#pragma once
//! Result codes of the core. Nothing in the core throws.

#include <cstdint>

namespace dspark {

enum class Code : int32_t {
    kOk = 0,
    kBadArgument = 1,  // a value is out of range
    kMissing = 2,      // an argument this mode needs is absent
    kBadWeights = 3,   // a weight or id table is unusable
    kMismatch = 4,     // two arguments do not belong together
};

//! Outcome of an operation: `field` names the argument at fault, `index` the request or element (-1 = none).
struct Status {
    Code code;
    char const* field;
    int64_t index;
    bool ok() const { return code == Code::kOk; }
};

inline Status okStatus() { return {Code::kOk, "", -1}; }

//! State of one request's logit rows.
enum RowStatus : int32_t {
    kRowOk = 0,
    kRowNan = 1,       // a NaN or +inf logit
    kRowNoFinite = 2,  // every logit is -inf
};

}  // namespace dspark
