//! One IPluginV3 class for every operation: all that differs between operations is data (OpDescription) and two functions.
#pragma once

#include "signature.h"

#include "../kernels/launch_status.h"

namespace trtllm_dspark {

constexpr char const* kNamespace = "trtllm_dspark";

//! A launch, resolved: shapes by symbol, pointers by tensor name.
class LaunchCall {
public:
    LaunchCall(Signature const& signature, Symbols const& symbols, Attributes const& attributes,
               nvinfer1::PluginTensorDesc const* inputDesc, void const* const* inputs, void* const* outputs,
               void* workspace)
        : signature_(signature), symbols_(symbols), attributes_(attributes), inputDesc_(inputDesc), inputs_(inputs),
          outputs_(outputs), workspace_(workspace) {}

    std::int64_t size(char const* symbol) const { return symbols_[symbol]; }
    int size32(char const* symbol) const;
    Attributes const& attributes() const { return attributes_; }
    void* workspace() const { return workspace_; }

    //! The input's address; null when the signature has no such input under the current fields.
    template <class T>
    T const* input(char const* name) const {
        return static_cast<T const*>(inputAddress(name));
    }
    template <class T>
    T* output(char const* name) const {
        return static_cast<T*>(outputAddress(name));
    }
    dspark::ElementType elementType(char const* inputName) const;

private:
    void const* inputAddress(char const* name) const noexcept;
    void* outputAddress(char const* name) const noexcept;

    Signature const& signature_;
    Symbols const& symbols_;
    Attributes const& attributes_;
    nvinfer1::PluginTensorDesc const* inputDesc_;
    void const* const* inputs_;
    void* const* outputs_;
    void* workspace_;
};

//! Everything that makes one operation a plugin.
struct OpDescription {
    char const* name;
    char const* version;
    std::vector<FieldSpec> fields;
    std::vector<TensorSpec> inputs;
    std::vector<TensorSpec> outputs;
    //! Throws FieldError when fields contradict each other; may be null.
    void (*checkFields)(Attributes const&);
    //! Bytes of scratch for these (largest) sizes; may be null.
    std::size_t (*workspaceBytes)(Symbols const&, Attributes const&);
    //! Fills the launcher's Params and launches.
    dspark::LaunchStatus (*launch)(LaunchCall const&, cudaStream_t);
};

class OpPlugin final : public nvinfer1::IPluginV3,
                       public nvinfer1::IPluginV3OneCore,
                       public nvinfer1::IPluginV3OneBuildV2,
                       public nvinfer1::IPluginV3OneRuntime {
public:
    OpPlugin(OpDescription const& op, Attributes attributes);

    nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
    nvinfer1::IPluginV3* clone() noexcept override;

    char const* getPluginName() const noexcept override { return op_.name; }
    char const* getPluginVersion() const noexcept override { return op_.version; }
    char const* getPluginNamespace() const noexcept override { return kNamespace; }

    std::int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* inputs, std::int32_t numInputs,
                                 nvinfer1::DynamicPluginTensorDesc const* outputs,
                                 std::int32_t numOutputs) noexcept override;
    std::int32_t getOutputDataTypes(nvinfer1::DataType* outputTypes, std::int32_t numOutputs,
                                    nvinfer1::DataType const* inputTypes, std::int32_t numInputs) const noexcept override;
    std::int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, std::int32_t numInputs,
                                 nvinfer1::DimsExprs const* shapeInputs, std::int32_t numShapeInputs,
                                 nvinfer1::DimsExprs* outputs, std::int32_t numOutputs,
                                 nvinfer1::IExprBuilder& builder) noexcept override;
    bool supportsFormatCombination(std::int32_t position, nvinfer1::DynamicPluginTensorDesc const* tensors,
                                   std::int32_t numInputs, std::int32_t numOutputs) noexcept override;
    std::int32_t getNbOutputs() const noexcept override {
        return static_cast<std::int32_t>(signature_.outputs.size());
    }
    std::size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* inputs, std::int32_t numInputs,
                                 nvinfer1::DynamicPluginTensorDesc const* outputs,
                                 std::int32_t numOutputs) const noexcept override;
    char const* getMetadataString() noexcept override { return metadata_.c_str(); }
    std::int32_t getAliasedInput(std::int32_t outputIndex) noexcept override;

    std::int32_t onShapeChange(nvinfer1::PluginTensorDesc const* inputs, std::int32_t numInputs,
                               nvinfer1::PluginTensorDesc const* outputs, std::int32_t numOutputs) noexcept override;
    std::int32_t enqueue(nvinfer1::PluginTensorDesc const* inputDesc, nvinfer1::PluginTensorDesc const* outputDesc,
                         void const* const* inputs, void* const* outputs, void* workspace,
                         cudaStream_t stream) noexcept override;
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override { return clone(); }
    nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override { return attributes_.serialize(); }

private:
    OpDescription const& op_;
    Attributes attributes_;
    Signature signature_;
    std::string metadata_;
};

//! Creates OpPlugin objects of one operation and tells TensorRT which fields it takes.
class OpCreator final : public nvinfer1::IPluginCreatorV3One {
public:
    explicit OpCreator(OpDescription const& op);

    nvinfer1::IPluginV3* createPlugin(char const* name, nvinfer1::PluginFieldCollection const* fields,
                                      nvinfer1::TensorRTPhase phase) noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override { return &collection_; }
    char const* getPluginName() const noexcept override { return op_.name; }
    char const* getPluginVersion() const noexcept override { return op_.version; }
    char const* getPluginNamespace() const noexcept override { return kNamespace; }

private:
    OpDescription const& op_;
    std::vector<nvinfer1::PluginField> fields_;
    nvinfer1::PluginFieldCollection collection_{};
};

}  // namespace trtllm_dspark
