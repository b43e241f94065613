//! Prints the binary layout of every TensorRT declaration that the plugins rely on, one fact a line.
//!
//! Compiled twice by test_abi_layout.py, against plugins/tensorrt/abi and against the official headers; the two outputs
//! must be equal. A virtual function's slot is read from its member pointer (Itanium ABI: 1 + byte offset).
#include <NvInferRuntime.h>

#include <cstdio>
#include <cstring>

using namespace nvinfer1;

template <class Member>
static long slotOf(Member member) {
    std::ptrdiff_t word = 0;
    std::memcpy(&word, &member, sizeof(word));
    return (word - 1) / static_cast<long>(sizeof(void*));
}

#define SLOT(type, method) std::printf("slot %s::%s %ld\n", #type, #method, slotOf(&type::method))
#define SIZE(type) std::printf("size %s %zu align %zu\n", #type, sizeof(type), alignof(type))
#define OFFSET(type, member) std::printf("offset %s::%s %zu\n", #type, #member, offsetof(type, member))
#define VALUE(enumerator) std::printf("value %s %d\n", #enumerator, static_cast<int>(enumerator))

// Concrete leaves, so that each interface's own getInterfaceInfo can be called without TensorRT.
struct LeafV3 : IPluginV3 {
    IPluginCapability* getCapabilityInterface(PluginCapabilityType) noexcept override { return nullptr; }
    IPluginV3* clone() noexcept override { return nullptr; }
};
struct LeafCore : IPluginV3OneCore {
    char const* getPluginName() const noexcept override { return ""; }
    char const* getPluginVersion() const noexcept override { return ""; }
    char const* getPluginNamespace() const noexcept override { return ""; }
};
template <class Base>
struct LeafBuild : Base {
    int32_t configurePlugin(DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*,
                            int32_t) noexcept override {
        return 0;
    }
    int32_t getOutputDataTypes(DataType*, int32_t, DataType const*, int32_t) const noexcept override { return 0; }
    int32_t getOutputShapes(DimsExprs const*, int32_t, DimsExprs const*, int32_t, DimsExprs*, int32_t,
                            IExprBuilder&) noexcept override {
        return 0;
    }
    bool supportsFormatCombination(int32_t, DynamicPluginTensorDesc const*, int32_t, int32_t) noexcept override {
        return false;
    }
    int32_t getNbOutputs() const noexcept override { return 0; }
};
struct LeafRuntime : IPluginV3OneRuntime {
    int32_t onShapeChange(PluginTensorDesc const*, int32_t, PluginTensorDesc const*, int32_t) noexcept override {
        return 0;
    }
    int32_t enqueue(PluginTensorDesc const*, PluginTensorDesc const*, void const* const*, void* const*, void*,
                    cudaStream_t) noexcept override {
        return 0;
    }
    IPluginV3* attachToContext(IPluginResourceContext*) noexcept override { return nullptr; }
    PluginFieldCollection const* getFieldsToSerialize() noexcept override { return nullptr; }
};
struct LeafCreator : IPluginCreatorV3One {
    IPluginV3* createPlugin(char const*, PluginFieldCollection const*, TensorRTPhase) noexcept override {
        return nullptr;
    }
    PluginFieldCollection const* getFieldNames() noexcept override { return nullptr; }
    char const* getPluginName() const noexcept override { return ""; }
    char const* getPluginVersion() const noexcept override { return ""; }
    char const* getPluginNamespace() const noexcept override { return ""; }
};
struct LeafLogger : ILogger {
    void log(Severity, char const*) noexcept override {}
};
struct LeafFinder : ILoggerFinder {
    ILogger* findLogger() override { return nullptr; }
};

template <class Leaf>
static void printInfo(char const* name) {
    Leaf leaf;
    InterfaceInfo const info = leaf.getInterfaceInfo();
    std::printf("info %s '%s' %d.%d language %d size %zu\n", name, info.kind, info.major, info.minor,
                static_cast<int>(leaf.getAPILanguage()), sizeof(Leaf));
}

int main() {
    SIZE(Dims);
    OFFSET(Dims, nbDims);
    OFFSET(Dims, d);
    SIZE(InterfaceInfo);
    OFFSET(InterfaceInfo, kind);
    OFFSET(InterfaceInfo, major);
    OFFSET(InterfaceInfo, minor);
    SIZE(PluginField);
    OFFSET(PluginField, name);
    OFFSET(PluginField, data);
    OFFSET(PluginField, type);
    OFFSET(PluginField, length);
    SIZE(PluginFieldCollection);
    OFFSET(PluginFieldCollection, nbFields);
    OFFSET(PluginFieldCollection, fields);
    SIZE(PluginTensorDesc);
    OFFSET(PluginTensorDesc, dims);
    OFFSET(PluginTensorDesc, type);
    OFFSET(PluginTensorDesc, format);
    OFFSET(PluginTensorDesc, scale);
    SIZE(DynamicPluginTensorDesc);
    OFFSET(DynamicPluginTensorDesc, desc);
    OFFSET(DynamicPluginTensorDesc, min);
    OFFSET(DynamicPluginTensorDesc, max);
    OFFSET(DynamicPluginTensorDesc, opt);
    SIZE(DimsExprs);
    OFFSET(DimsExprs, nbDims);
    OFFSET(DimsExprs, d);
    SIZE(IDimensionExpr);
    SIZE(IExprBuilder);

    SLOT(IVersionedInterface, getAPILanguage);
    SLOT(IVersionedInterface, getInterfaceInfo);
    SLOT(IPluginV3, getCapabilityInterface);
    SLOT(IPluginV3, clone);
    SLOT(IPluginV3OneCore, getPluginName);
    SLOT(IPluginV3OneCore, getPluginVersion);
    SLOT(IPluginV3OneCore, getPluginNamespace);
    SLOT(IPluginV3OneBuild, configurePlugin);
    SLOT(IPluginV3OneBuild, getOutputDataTypes);
    SLOT(IPluginV3OneBuild, getOutputShapes);
    SLOT(IPluginV3OneBuild, supportsFormatCombination);
    SLOT(IPluginV3OneBuild, getNbOutputs);
    SLOT(IPluginV3OneBuild, getWorkspaceSize);
    SLOT(IPluginV3OneBuild, getValidTactics);
    SLOT(IPluginV3OneBuild, getNbTactics);
    SLOT(IPluginV3OneBuild, getTimingCacheID);
    SLOT(IPluginV3OneBuild, getFormatCombinationLimit);
    SLOT(IPluginV3OneBuild, getMetadataString);
    SLOT(IPluginV3OneBuildV2, getAliasedInput);
    SLOT(IPluginV3OneRuntime, setTactic);
    SLOT(IPluginV3OneRuntime, onShapeChange);
    SLOT(IPluginV3OneRuntime, enqueue);
    SLOT(IPluginV3OneRuntime, attachToContext);
    SLOT(IPluginV3OneRuntime, getFieldsToSerialize);
    SLOT(IPluginCreatorV3One, createPlugin);
    SLOT(IPluginCreatorV3One, getFieldNames);
    SLOT(IPluginCreatorV3One, getPluginName);
    SLOT(IPluginCreatorV3One, getPluginVersion);
    SLOT(IPluginCreatorV3One, getPluginNamespace);
    SLOT(ILogger, log);
    SLOT(ILoggerFinder, findLogger);
    SLOT(apiv::VDimensionExpr, isConstant);
    SLOT(apiv::VDimensionExpr, getConstantValue);
    SLOT(apiv::VDimensionExpr, isSizeTensor);
    SLOT(apiv::VExprBuilder, constant);
    SLOT(apiv::VExprBuilder, operation);
    SLOT(apiv::VExprBuilder, declareSizeTensor);

    printInfo<LeafV3>("IPluginV3");
    printInfo<LeafCore>("IPluginV3OneCore");
    printInfo<LeafBuild<IPluginV3OneBuild>>("IPluginV3OneBuild");
    printInfo<LeafBuild<IPluginV3OneBuildV2>>("IPluginV3OneBuildV2");
    printInfo<LeafRuntime>("IPluginV3OneRuntime");
    printInfo<LeafCreator>("IPluginCreatorV3One");
    printInfo<LeafLogger>("ILogger");
    printInfo<LeafFinder>("ILoggerFinder");

    VALUE(DataType::kFLOAT);
    VALUE(DataType::kHALF);
    VALUE(DataType::kINT8);
    VALUE(DataType::kINT32);
    VALUE(DataType::kBF16);
    VALUE(DataType::kINT64);
    VALUE(DataType::kFP8);
    VALUE(TensorFormat::kLINEAR);
    VALUE(PluginFieldType::kFLOAT32);
    VALUE(PluginFieldType::kINT32);
    VALUE(PluginFieldType::kINT64);
    VALUE(PluginFieldType::kCHAR);
    VALUE(PluginFieldType::kUNKNOWN);
    VALUE(PluginCapabilityType::kCORE);
    VALUE(PluginCapabilityType::kBUILD);
    VALUE(PluginCapabilityType::kRUNTIME);
    VALUE(TensorRTPhase::kBUILD);
    VALUE(TensorRTPhase::kRUNTIME);
    VALUE(DimensionOperation::kSUM);
    VALUE(DimensionOperation::kPROD);
    VALUE(DimensionOperation::kCEIL_DIV);
    VALUE(ILogger::Severity::kERROR);
    VALUE(ILogger::Severity::kINFO);
    return 0;
}
