//! Minimal declaration of the TensorRT 11 interfaces that plugins/tensorrt implements or calls.
//!
//! Written for this project, for machines that have no TensorRT headers: no package registry carries them. It is on the
//! include path only when CMake was not given -DTENSORRT_INCLUDE_DIR; with the official headers this file is not read.
//! tests/tensorrt compares every vtable slot, size and offset below with the official headers when they are at hand.
//!
//! What counts here is the binary layout: order of virtual functions, order and types of members, values of
//! enumerators, and the interface kind strings with their versions. Only what the plugins touch is declared; enumerators
//! that they never name are left out.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

//! Tells plugin code which of the two declarations it was compiled against.
#define DSPARK_TENSORRT_ABI_HEADERS 1

namespace nvinfer1 {

using char_t = char;
using AsciiChar = char_t;
using InterfaceKind = char const*;

enum class APILanguage : std::int32_t { kCPP = 0, kPYTHON = 1 };
enum class TensorRTPhase : std::int32_t { kBUILD = 0, kRUNTIME = 1 };
enum class PluginCapabilityType : std::int32_t { kCORE = 0, kBUILD = 1, kRUNTIME = 2 };
enum class TensorFormat : std::int32_t { kLINEAR = 0, kCHW2 = 1 };

enum class DataType : std::int32_t {
    kFLOAT = 0,
    kHALF = 1,
    kINT8 = 2,
    kINT32 = 3,
    kBOOL = 4,
    kUINT8 = 5,
    kFP8 = 6,
    kBF16 = 7,
    kINT64 = 8,
};

enum class PluginFieldType : std::int32_t {
    kFLOAT16 = 0,
    kFLOAT32 = 1,
    kFLOAT64 = 2,
    kINT8 = 3,
    kINT16 = 4,
    kINT32 = 5,
    kCHAR = 6,
    kDIMS = 7,
    kUNKNOWN = 8,
    kBF16 = 9,
    kINT64 = 10,
};

enum class DimensionOperation : std::int32_t {
    kSUM = 0,
    kPROD = 1,
    kMAX = 2,
    kMIN = 3,
    kSUB = 4,
    kEQUAL = 5,
    kLESS = 6,
    kFLOOR_DIV = 7,
    kCEIL_DIV = 8,
};

// ---- plain data --------------------------------------------------------------------------------------------------

class Dims64 {
public:
    static constexpr std::int32_t MAX_DIMS{8};
    std::int32_t nbDims;
    std::int64_t d[MAX_DIMS];
};
using Dims = Dims64;

class InterfaceInfo {
public:
    InterfaceKind kind;
    std::int32_t major;
    std::int32_t minor;
};

class PluginField {
public:
    AsciiChar const* name;
    void const* data;
    PluginFieldType type;
    std::int32_t length;

    PluginField(AsciiChar const* fieldName = nullptr, void const* values = nullptr,
                PluginFieldType valueType = PluginFieldType::kUNKNOWN, std::int32_t count = 0) noexcept
        : name(fieldName), data(values), type(valueType), length(count) {}
};

struct PluginFieldCollection {
    std::int32_t nbFields{};
    PluginField const* fields{};
};

struct PluginTensorDesc {
    Dims dims;
    DataType type;
    TensorFormat format;
    float scale;
};

struct DynamicPluginTensorDesc {
    PluginTensorDesc desc;
    Dims min;
    Dims max;
    Dims opt;
};

// ---- interfaces that TensorRT implements -------------------------------------------------------------------------

class INoCopy {
protected:
    INoCopy() = default;
    virtual ~INoCopy() = default;
    INoCopy(INoCopy const&) = delete;
    INoCopy& operator=(INoCopy const&) = delete;
};

class IDimensionExpr;

// Dimension expressions are handles: the calls below land in tables that the builder supplies.
namespace apiv {
class VRoot {
public:
    virtual ~VRoot() noexcept = default;
};

class VDimensionExpr : public VRoot {
public:
    virtual bool isConstant() const = 0;
    virtual std::int64_t getConstantValue() const = 0;
    virtual bool isSizeTensor() const = 0;
};

class VExprBuilder : public VRoot {
public:
    virtual IDimensionExpr const* constant(std::int64_t value) = 0;
    virtual IDimensionExpr const* operation(DimensionOperation op, IDimensionExpr const& first,
                                            IDimensionExpr const& second) = 0;
    virtual IDimensionExpr const* declareSizeTensor(std::int32_t outputIndex, IDimensionExpr const& opt,
                                                    IDimensionExpr const& upper) = 0;
};
}  // namespace apiv

class IDimensionExpr : public INoCopy {
public:
    bool isConstant() const noexcept { return mImpl->isConstant(); }
    std::int64_t getConstantValue() const noexcept { return mImpl->getConstantValue(); }

protected:
    apiv::VDimensionExpr* mImpl;
    virtual ~IDimensionExpr() noexcept = default;
};

class IExprBuilder : public INoCopy {
public:
    IDimensionExpr const* constant(std::int64_t value) noexcept { return mImpl->constant(value); }
    IDimensionExpr const* operation(DimensionOperation op, IDimensionExpr const& first,
                                    IDimensionExpr const& second) noexcept {
        return mImpl->operation(op, first, second);
    }

protected:
    apiv::VExprBuilder* mImpl;
    virtual ~IExprBuilder() noexcept = default;
};

class DimsExprs {
public:
    std::int32_t nbDims;
    IDimensionExpr const* d[Dims::MAX_DIMS];
};

class IPluginResourceContext;

//! Root of every interface that crosses the library boundary.
class IVersionedInterface {
public:
    virtual APILanguage getAPILanguage() const noexcept { return APILanguage::kCPP; }
    virtual InterfaceInfo getInterfaceInfo() const noexcept = 0;
    virtual ~IVersionedInterface() noexcept = default;
};

namespace v_1_0 {

class ILogger : public IVersionedInterface {
public:
    enum class Severity : std::int32_t { kINTERNAL_ERROR = 0, kERROR = 1, kWARNING = 2, kINFO = 3, kVERBOSE = 4 };

    InterfaceInfo getInterfaceInfo() const noexcept override { return {"ILogger", 1, 0}; }
    virtual void log(Severity severity, AsciiChar const* message) noexcept = 0;
};

class ILoggerFinder : public IVersionedInterface {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"ILoggerFinder", 1, 0}; }
    virtual ILogger* findLogger() = 0;

protected:
    ~ILoggerFinder() override = default;
};

// ---- interfaces that a plugin implements -------------------------------------------------------------------------

class IPluginCapability : public IVersionedInterface {};

class IPluginV3 : public IVersionedInterface {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN", 1, 0}; }
    virtual IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept = 0;
    virtual IPluginV3* clone() noexcept = 0;
};

class IPluginV3OneCore : public IPluginCapability {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_CORE", 1, 0}; }
    virtual AsciiChar const* getPluginName() const noexcept = 0;
    virtual AsciiChar const* getPluginVersion() const noexcept = 0;
    virtual AsciiChar const* getPluginNamespace() const noexcept = 0;
};

class IPluginV3OneBuild : public IPluginCapability {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_BUILD", 1, 0}; }
    virtual std::int32_t configurePlugin(DynamicPluginTensorDesc const* inputs, std::int32_t numInputs,
                                         DynamicPluginTensorDesc const* outputs, std::int32_t numOutputs) noexcept = 0;
    virtual std::int32_t getOutputDataTypes(DataType* outputTypes, std::int32_t numOutputs, DataType const* inputTypes,
                                            std::int32_t numInputs) const noexcept = 0;
    virtual std::int32_t getOutputShapes(DimsExprs const* inputs, std::int32_t numInputs, DimsExprs const* shapeInputs,
                                         std::int32_t numShapeInputs, DimsExprs* outputs, std::int32_t numOutputs,
                                         IExprBuilder& builder) noexcept = 0;
    virtual bool supportsFormatCombination(std::int32_t position, DynamicPluginTensorDesc const* tensors,
                                           std::int32_t numInputs, std::int32_t numOutputs) noexcept = 0;
    virtual std::int32_t getNbOutputs() const noexcept = 0;
    virtual std::size_t getWorkspaceSize(DynamicPluginTensorDesc const*, std::int32_t, DynamicPluginTensorDesc const*,
                                         std::int32_t) const noexcept {
        return 0;
    }
    virtual std::int32_t getValidTactics(std::int32_t*, std::int32_t) noexcept { return 0; }
    virtual std::int32_t getNbTactics() noexcept { return 0; }
    virtual char const* getTimingCacheID() noexcept { return nullptr; }
    virtual std::int32_t getFormatCombinationLimit() noexcept { return 100; }
    virtual char const* getMetadataString() noexcept { return nullptr; }
};

class IPluginV3OneRuntime : public IPluginCapability {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_RUNTIME", 1, 0}; }
    virtual std::int32_t setTactic(std::int32_t) noexcept { return 0; }
    virtual std::int32_t onShapeChange(PluginTensorDesc const* inputs, std::int32_t numInputs,
                                       PluginTensorDesc const* outputs, std::int32_t numOutputs) noexcept = 0;
    virtual std::int32_t enqueue(PluginTensorDesc const* inputDesc, PluginTensorDesc const* outputDesc,
                                 void const* const* inputs, void* const* outputs, void* workspace,
                                 cudaStream_t stream) noexcept = 0;
    virtual IPluginV3* attachToContext(IPluginResourceContext* context) noexcept = 0;
    virtual PluginFieldCollection const* getFieldsToSerialize() noexcept = 0;
};

class IPluginCreatorInterface : public IVersionedInterface {
public:
    ~IPluginCreatorInterface() noexcept override = default;
};

class IPluginCreatorV3One : public IPluginCreatorInterface {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN CREATOR_V3ONE", 1, 0}; }
    virtual IPluginV3* createPlugin(AsciiChar const* name, PluginFieldCollection const* fields,
                                    TensorRTPhase phase) noexcept = 0;
    virtual PluginFieldCollection const* getFieldNames() noexcept = 0;
    virtual AsciiChar const* getPluginName() const noexcept = 0;
    virtual AsciiChar const* getPluginVersion() const noexcept = 0;
    virtual AsciiChar const* getPluginNamespace() const noexcept = 0;
};

}  // namespace v_1_0

namespace v_2_0 {

//! Adds aliasing: which input an output shares its memory with, or -1.
class IPluginV3OneBuild : public v_1_0::IPluginV3OneBuild {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_BUILD", 2, 0}; }
    virtual std::int32_t getAliasedInput(std::int32_t) noexcept { return -1; }
};

}  // namespace v_2_0

using ILogger = v_1_0::ILogger;
using ILoggerFinder = v_1_0::ILoggerFinder;
using IPluginCapability = v_1_0::IPluginCapability;
using IPluginV3 = v_1_0::IPluginV3;
using IPluginV3OneCore = v_1_0::IPluginV3OneCore;
using IPluginV3OneBuild = v_1_0::IPluginV3OneBuild;
using IPluginV3OneBuildV2 = v_2_0::IPluginV3OneBuild;
using IPluginV3OneRuntime = v_1_0::IPluginV3OneRuntime;
using IPluginCreatorInterface = v_1_0::IPluginCreatorInterface;
using IPluginCreatorV3One = v_1_0::IPluginCreatorV3One;

}  // namespace nvinfer1
