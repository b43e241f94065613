//! The operations of the library, one function a file.
#pragma once

#include "op_plugin.h"

namespace trtllm_dspark {

OpDescription const& markovDraftOp();
OpDescription const& confidenceScheduleOp();
OpDescription const& raggedAcceptOp();
OpDescription const& raggedAttentionOp();
OpDescription const& kvAppendOp();

//! All of them, in a fixed order.
std::vector<OpDescription const*> const& allOps();

//! Everything an engine relies on when it refers to these plugins, as canonical text; its SHA-256 goes into manifests.
std::string const& contractText();

// Type sets used by the signatures.
inline TypeSpec int32Type() { return {{nvinfer1::DataType::kINT32}, 0}; }
inline TypeSpec int64Type() { return {{nvinfer1::DataType::kINT64}, 0}; }
inline TypeSpec float32Type() { return {{nvinfer1::DataType::kFLOAT}, 0}; }
inline TypeSpec floatTypes(char group) {
    return {{nvinfer1::DataType::kFLOAT, nvinfer1::DataType::kHALF, nvinfer1::DataType::kBF16}, group};
}
inline TypeSpec halfTypes(char group) { return {{nvinfer1::DataType::kHALF, nvinfer1::DataType::kBF16}, group}; }

}  // namespace trtllm_dspark
