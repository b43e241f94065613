#include "op_plugin.h"

#include "log.h"

#include <cstring>
#include <limits>

namespace trtllm_dspark {

using namespace nvinfer1;

namespace {

constexpr std::size_t kMaxTensors = 24;

std::size_t indexOf(std::vector<TensorSpec> const& specs, char const* name) noexcept {
    for (std::size_t index = 0; index < specs.size(); ++index) {
        if (std::strcmp(specs[index].name, name) == 0) {
            return index;
        }
    }
    return specs.size();
}

bool isAllowed(TypeSpec const& type, DataType candidate) noexcept {
    for (DataType allowed : type.allowed) {
        if (allowed == candidate) {
            return true;
        }
    }
    return false;
}

void checkTensor(TensorSpec const& spec, PluginTensorDesc const& desc) {
    if (!isAllowed(spec.type, desc.type)) {
        throw SignatureError(std::string(spec.name) + ": expected " + typesText(spec.type) + ", got " +
                             typeName(desc.type));
    }
    if (desc.format != TensorFormat::kLINEAR) {
        throw SignatureError(std::string(spec.name) + ": expected the linear format, got format " +
                             std::to_string(static_cast<int>(desc.format)));
    }
}

Symbols symbolsOf(Signature const& signature, Attributes const& attributes, PluginTensorDesc const* inputs,
                  std::int32_t numInputs) {
    Dims const* dims[kMaxTensors] = {};
    for (std::int32_t input = 0; input < numInputs && input < static_cast<std::int32_t>(kMaxTensors); ++input) {
        dims[input] = &inputs[input].dims;
    }
    return bindSymbols(signature, attributes, dims, numInputs);
}

// A dynamic dim is -1 in `desc`; the profile's maximum decides how much memory is needed.
Symbols largestSymbols(Signature const& signature, Attributes const& attributes, DynamicPluginTensorDesc const* inputs,
                       std::int32_t numInputs) {
    Dims largest[kMaxTensors];
    Dims const* dims[kMaxTensors] = {};
    for (std::int32_t input = 0; input < numInputs && input < static_cast<std::int32_t>(kMaxTensors); ++input) {
        largest[input] = inputs[input].desc.dims;
        for (std::int32_t axis = 0; axis < largest[input].nbDims; ++axis) {
            if (largest[input].d[axis] < 0) {
                largest[input].d[axis] = inputs[input].max.d[axis];
            }
        }
        dims[input] = &largest[input];
    }
    return bindSymbols(signature, attributes, dims, numInputs);
}

}  // namespace

int LaunchCall::size32(char const* symbol) const {
    std::int64_t const value = size(symbol);
    if (value < 0 || value > std::numeric_limits<int>::max()) {
        throw SignatureError("dimension '" + std::string(symbol) + "' = " + std::to_string(value) +
                             " does not fit 32 bits");
    }
    return static_cast<int>(value);
}

void const* LaunchCall::inputAddress(char const* name) const noexcept {
    std::size_t const index = indexOf(signature_.inputs, name);
    return index == signature_.inputs.size() ? nullptr : inputs_[index];
}

void* LaunchCall::outputAddress(char const* name) const noexcept {
    std::size_t const index = indexOf(signature_.outputs, name);
    return index == signature_.outputs.size() ? nullptr : outputs_[index];
}

dspark::ElementType LaunchCall::elementType(char const* inputName) const {
    std::size_t const index = indexOf(signature_.inputs, inputName);
    if (index == signature_.inputs.size()) {
        throw SignatureError("no input '" + std::string(inputName) + "'");
    }
    switch (inputDesc_[index].type) {
        case DataType::kFLOAT: return dspark::ElementType::kFloat32;
        case DataType::kHALF: return dspark::ElementType::kFloat16;
        case DataType::kBF16: return dspark::ElementType::kBFloat16;
        case DataType::kINT8: return dspark::ElementType::kInt8;
        default:
            throw SignatureError(std::string(inputName) + ": " + typeName(inputDesc_[index].type) +
                                 " is not a type of the kernels");
    }
}

OpPlugin::OpPlugin(OpDescription const& op, Attributes attributes)
    : op_(op), attributes_(std::move(attributes)),
      signature_(presentTensors(op.inputs, op.outputs, attributes_)), metadata_(attributes_.text()) {}

IPluginCapability* OpPlugin::getCapabilityInterface(PluginCapabilityType type) noexcept {
    switch (type) {
        case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
        case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuildV2*>(this);
        case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

IPluginV3* OpPlugin::clone() noexcept {
    return guarded<IPluginV3*>(op_.name, nullptr, [&] { return new OpPlugin(op_, attributes_); });
}

std::int32_t OpPlugin::configurePlugin(DynamicPluginTensorDesc const* inputs, std::int32_t numInputs,
                                       DynamicPluginTensorDesc const* outputs, std::int32_t numOutputs) noexcept {
    return guarded<std::int32_t>(op_.name, -1, [&] {
        largestSymbols(signature_, attributes_, inputs, numInputs);
        for (std::int32_t input = 0; input < numInputs; ++input) {
            checkTensor(signature_.inputs[static_cast<std::size_t>(input)], inputs[input].desc);
        }
        if (numOutputs != getNbOutputs()) {
            throw SignatureError("expected " + std::to_string(getNbOutputs()) + " outputs, got " +
                                 std::to_string(numOutputs));
        }
        for (std::int32_t output = 0; output < numOutputs; ++output) {
            checkTensor(signature_.outputs[static_cast<std::size_t>(output)], outputs[output].desc);
        }
        return 0;
    });
}

std::int32_t OpPlugin::getOutputDataTypes(DataType* outputTypes, std::int32_t numOutputs, DataType const* inputTypes,
                                          std::int32_t numInputs) const noexcept {
    return guarded<std::int32_t>(op_.name, -1, [&] {
        if (numOutputs != getNbOutputs() || numInputs != static_cast<std::int32_t>(signature_.inputs.size())) {
            throw SignatureError("expected " + std::to_string(signature_.inputs.size()) + " inputs and " +
                                 std::to_string(getNbOutputs()) + " outputs, got " + std::to_string(numInputs) +
                                 " and " + std::to_string(numOutputs));
        }
        for (std::int32_t output = 0; output < numOutputs; ++output) {
            TypeSpec const& type = signature_.outputs[static_cast<std::size_t>(output)].type;
            outputTypes[output] = type.allowed.front();
            for (std::int32_t input = 0; type.group != 0 && input < numInputs; ++input) {
                if (signature_.inputs[static_cast<std::size_t>(input)].type.group == type.group) {
                    outputTypes[output] = inputTypes[input];
                }
            }
        }
        return 0;
    });
}

std::int32_t OpPlugin::getOutputShapes(DimsExprs const* inputs, std::int32_t numInputs, DimsExprs const*, std::int32_t,
                                       DimsExprs* outputs, std::int32_t numOutputs, IExprBuilder& builder) noexcept {
    return guarded<std::int32_t>(op_.name, -1, [&] {
        Dims constants[kMaxTensors];
        Dims const* dims[kMaxTensors] = {};
        for (std::int32_t input = 0; input < numInputs && input < static_cast<std::int32_t>(kMaxTensors); ++input) {
            constants[input].nbDims = inputs[input].nbDims;
            for (std::int32_t axis = 0; axis < inputs[input].nbDims; ++axis) {
                IDimensionExpr const* dim = inputs[input].d[axis];
                constants[input].d[axis] = dim->isConstant() ? dim->getConstantValue() : -1;
            }
            dims[input] = &constants[input];
        }
        bindSymbols(signature_, attributes_, dims, numInputs);  // refuses contradicting constants

        auto const symbolOf = [&](char const* symbol) -> IDimensionExpr const* {
            if (attributes_.has(symbol)) {
                return builder.constant(attributes_.integer(symbol));
            }
            for (std::int32_t input = 0; input < numInputs; ++input) {
                std::vector<DimSpec> const& specs = signature_.inputs[static_cast<std::size_t>(input)].dims;
                for (std::size_t axis = 0; axis < specs.size(); ++axis) {
                    DimSpec const& dim = specs[axis];
                    if (dim.symbol != nullptr && dim.plus == 0 && dim.symbol2 == nullptr &&
                        std::strcmp(dim.symbol, symbol) == 0) {
                        return inputs[input].d[axis];
                    }
                }
            }
            throw SignatureError("no input has the dimension '" + std::string(symbol) + "'");
        };
        auto const factor = [&](char const* symbol, std::int32_t plus) -> IDimensionExpr const* {
            if (symbol == nullptr) {
                return builder.constant(plus);
            }
            IDimensionExpr const* value = symbolOf(symbol);
            return plus == 0 ? value : builder.operation(DimensionOperation::kSUM, *value, *builder.constant(plus));
        };
        for (std::int32_t output = 0; output < numOutputs; ++output) {
            TensorSpec const& spec = signature_.outputs[static_cast<std::size_t>(output)];
            outputs[output].nbDims = static_cast<std::int32_t>(spec.dims.size());
            for (std::size_t axis = 0; axis < spec.dims.size(); ++axis) {
                DimSpec const& dim = spec.dims[axis];
                IDimensionExpr const* value = factor(dim.symbol, dim.plus);
                if (dim.symbol2 != nullptr) {
                    value = builder.operation(DimensionOperation::kPROD, *value, *factor(dim.symbol2, dim.plus2));
                }
                outputs[output].d[axis] = value;
            }
        }
        return 0;
    });
}

bool OpPlugin::supportsFormatCombination(std::int32_t position, DynamicPluginTensorDesc const* tensors,
                                         std::int32_t numInputs, std::int32_t numOutputs) noexcept {
    return guarded<bool>(op_.name, false, [&] {
        if (numInputs != static_cast<std::int32_t>(signature_.inputs.size()) || numOutputs != getNbOutputs() ||
            position < 0 || position >= numInputs + numOutputs) {
            return false;
        }
        auto const specAt = [&](std::int32_t index) -> TensorSpec const& {
            return index < numInputs ? signature_.inputs[static_cast<std::size_t>(index)]
                                     : signature_.outputs[static_cast<std::size_t>(index - numInputs)];
        };
        TensorSpec const& spec = specAt(position);
        PluginTensorDesc const& desc = tensors[position].desc;
        if (desc.format != TensorFormat::kLINEAR || !isAllowed(spec.type, desc.type)) {
            return false;
        }
        for (std::int32_t earlier = 0; spec.type.group != 0 && earlier < position; ++earlier) {
            if (specAt(earlier).type.group == spec.type.group && tensors[earlier].desc.type != desc.type) {
                return false;
            }
        }
        return true;
    });
}

std::size_t OpPlugin::getWorkspaceSize(DynamicPluginTensorDesc const* inputs, std::int32_t numInputs,
                                       DynamicPluginTensorDesc const*, std::int32_t) const noexcept {
    return guarded<std::size_t>(op_.name, 0, [&] {
        return op_.workspaceBytes == nullptr
                   ? std::size_t{0}
                   : op_.workspaceBytes(largestSymbols(signature_, attributes_, inputs, numInputs), attributes_);
    });
}

std::int32_t OpPlugin::getAliasedInput(std::int32_t outputIndex) noexcept {
    if (outputIndex < 0 || outputIndex >= getNbOutputs()) {
        return -1;
    }
    char const* input = signature_.outputs[static_cast<std::size_t>(outputIndex)].aliases;
    return input == nullptr ? -1 : static_cast<std::int32_t>(indexOf(signature_.inputs, input));
}

std::int32_t OpPlugin::onShapeChange(PluginTensorDesc const* inputs, std::int32_t numInputs, PluginTensorDesc const*,
                                     std::int32_t) noexcept {
    return guarded<std::int32_t>(op_.name, -1, [&] {
        symbolsOf(signature_, attributes_, inputs, numInputs);
        return 0;
    });
}

std::int32_t OpPlugin::enqueue(PluginTensorDesc const* inputDesc, PluginTensorDesc const*, void const* const* inputs,
                               void* const* outputs, void* workspace, cudaStream_t stream) noexcept {
    return guarded<std::int32_t>(op_.name, -1, [&] {
        Symbols const symbols =
            symbolsOf(signature_, attributes_, inputDesc, static_cast<std::int32_t>(signature_.inputs.size()));
        LaunchCall const call(signature_, symbols, attributes_, inputDesc, inputs, outputs, workspace);
        dspark::LaunchStatus const status = op_.launch(call, stream);
        if (!status.ok()) {
            throw SignatureError(dspark::launchStatusText(status));
        }
        return 0;
    });
}

OpCreator::OpCreator(OpDescription const& op) : op_(op) {
    for (FieldSpec const& spec : op.fields) {
        fields_.emplace_back(spec.name, nullptr, spec.is_float ? PluginFieldType::kFLOAT32 : PluginFieldType::kINT32, 1);
    }
    collection_.nbFields = static_cast<std::int32_t>(fields_.size());
    collection_.fields = fields_.data();
}

IPluginV3* OpCreator::createPlugin(char const*, PluginFieldCollection const* fields, TensorRTPhase) noexcept {
    return guarded<IPluginV3*>(op_.name, nullptr, [&] {
        Attributes attributes = Attributes::read(op_.fields, fields);
        if (op_.checkFields != nullptr) {
            op_.checkFields(attributes);
        }
        return new OpPlugin(op_, std::move(attributes));
    });
}

}  // namespace trtllm_dspark
