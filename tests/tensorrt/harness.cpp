//! Drives a plugin library the way TensorRT does, for tests: creators, build-time queries, clone, serialise, enqueue.
//!
//! Implements the interfaces that TensorRT would bring: logger, logger finder, dimension expressions (as text).
#include <NvInferRuntime.h>

#include <dlfcn.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

using namespace nvinfer1;

namespace {

class TestLogger final : public ILogger {
public:
    void log(Severity severity, AsciiChar const* message) noexcept override {
        text += std::to_string(static_cast<int>(severity)) + " " + message + "\n";
    }
    std::string text;
};

class TestFinder final : public ILoggerFinder {
public:
    ILogger* findLogger() override { return &logger; }
    TestLogger logger;
};

//! An expression is its text; constants also keep their value.
class TextExpr final : public IDimensionExpr, private apiv::VDimensionExpr {
public:
    TextExpr(std::string expression, bool constant, std::int64_t number)
        : text(std::move(expression)), constant_(constant), value_(number) {
        mImpl = this;
    }
    ~TextExpr() noexcept override = default;
    std::string text;

private:
    bool isConstant() const override { return constant_; }
    std::int64_t getConstantValue() const override { return value_; }
    bool isSizeTensor() const override { return false; }
    bool constant_;
    std::int64_t value_;
};

class TextBuilder final : public IExprBuilder, private apiv::VExprBuilder {
public:
    TextBuilder() { mImpl = this; }
    ~TextBuilder() noexcept override = default;

    IDimensionExpr const* make(std::string text, bool isConstant, std::int64_t value) {
        owned_.push_back(std::make_unique<TextExpr>(std::move(text), isConstant, value));
        return owned_.back().get();
    }

private:
    IDimensionExpr const* constant(std::int64_t value) override { return make(std::to_string(value), true, value); }
    IDimensionExpr const* operation(DimensionOperation op, IDimensionExpr const& first,
                                    IDimensionExpr const& second) override {
        char const* const name = op == DimensionOperation::kSUM ? "+" : op == DimensionOperation::kPROD ? "*" : "?";
        return make("(" + static_cast<TextExpr const&>(first).text + name +
                        static_cast<TextExpr const&>(second).text + ")",
                    false, 0);
    }
    IDimensionExpr const* declareSizeTensor(std::int32_t, IDimensionExpr const&, IDimensionExpr const&) override {
        return nullptr;
    }
    std::vector<std::unique_ptr<TextExpr>> owned_;
};

TestFinder g_finder;
std::string g_text;

IPluginV3OneBuildV2* buildOf(IPluginV3* plugin) {
    return static_cast<IPluginV3OneBuildV2*>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD));
}
IPluginV3OneRuntime* runtimeOf(IPluginV3* plugin) {
    return static_cast<IPluginV3OneRuntime*>(plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
}

}  // namespace

extern "C" {

struct TensorArg {
    std::int32_t type;
    std::int32_t format;
    std::int32_t num_dims;
    std::int64_t dims[8];  // -1 = dynamic
    std::int64_t most[8];  // profile maximum
    void* data;
};

static DynamicPluginTensorDesc descOf(TensorArg const& tensor) {
    DynamicPluginTensorDesc desc{};
    desc.desc.type = static_cast<DataType>(tensor.type);
    desc.desc.format = static_cast<TensorFormat>(tensor.format);
    desc.desc.dims.nbDims = desc.min.nbDims = desc.max.nbDims = desc.opt.nbDims = tensor.num_dims;
    for (int axis = 0; axis < tensor.num_dims; ++axis) {
        desc.desc.dims.d[axis] = tensor.dims[axis];
        desc.min.d[axis] = 1;
        desc.max.d[axis] = desc.opt.d[axis] = tensor.most[axis];
    }
    return desc;
}

static std::vector<DynamicPluginTensorDesc> descsOf(TensorArg const* tensors, std::int32_t count) {
    std::vector<DynamicPluginTensorDesc> descs;
    for (std::int32_t index = 0; index < count; ++index) descs.push_back(descOf(tensors[index]));
    return descs;
}

//! Messages since the last call.
char const* harness_log() {
    g_text.swap(g_finder.logger.text);
    g_finder.logger.text.clear();
    return g_text.c_str();
}

//! Loads a library and hands it the logger; null when it lacks a symbol.
void* harness_open(char const* path) {
    void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return nullptr;
    auto* const set_finder = reinterpret_cast<void (*)(ILoggerFinder*)>(dlsym(library, "setLoggerFinder"));
    if (set_finder == nullptr || dlsym(library, "getCreators") == nullptr) return nullptr;
    set_finder(&g_finder);
    return library;
}

//! "name version namespace kind major.minor: field:type ..." a line.
char const* harness_creators(void* library) {
    auto* const get = reinterpret_cast<IPluginCreatorInterface* const* (*)(std::int32_t&)>(dlsym(library, "getCreators"));
    std::int32_t count = 0;
    IPluginCreatorInterface* const* const creators = get(count);
    g_text.clear();
    for (std::int32_t index = 0; index < count; ++index) {
        auto* const creator = static_cast<IPluginCreatorV3One*>(creators[index]);
        InterfaceInfo const info = creator->getInterfaceInfo();
        g_text += std::string(creator->getPluginName()) + " " + creator->getPluginVersion() + " " +
                  creator->getPluginNamespace() + " " + info.kind + ":";
        PluginFieldCollection const* const fields = creator->getFieldNames();
        for (std::int32_t field = 0; field < fields->nbFields; ++field) {
            g_text += std::string(" ") + fields->fields[field].name + ":" +
                      std::to_string(static_cast<int>(fields->fields[field].type));
        }
        g_text += "\n";
    }
    return g_text.c_str();
}

IPluginV3* harness_create(void* library, char const* name, std::int32_t count, char const* const* names,
                          std::int32_t const* types, std::int32_t const* lengths, void const* const* data) {
    auto* const get = reinterpret_cast<IPluginCreatorInterface* const* (*)(std::int32_t&)>(dlsym(library, "getCreators"));
    std::int32_t creators = 0;
    IPluginCreatorInterface* const* const list = get(creators);
    std::vector<PluginField> fields;
    for (std::int32_t index = 0; index < count; ++index) {
        fields.emplace_back(names[index], data[index], static_cast<PluginFieldType>(types[index]), lengths[index]);
    }
    PluginFieldCollection const collection{count, fields.data()};
    for (std::int32_t index = 0; index < creators; ++index) {
        auto* const creator = static_cast<IPluginCreatorV3One*>(list[index]);
        if (std::strcmp(creator->getPluginName(), name) == 0) {
            return creator->createPlugin(name, &collection, TensorRTPhase::kBUILD);
        }
    }
    return nullptr;
}

//! What the plugin would put into a plan: "name type length value" a line.
char const* harness_fields(IPluginV3* plugin) {
    PluginFieldCollection const* const fields = runtimeOf(plugin)->getFieldsToSerialize();
    g_text.clear();
    for (std::int32_t index = 0; index < fields->nbFields; ++index) {
        PluginField const& field = fields->fields[index];
        bool const real = field.type == PluginFieldType::kFLOAT32;
        g_text += std::string(field.name) + " " + std::to_string(static_cast<int>(field.type)) + " " +
                  std::to_string(field.length) + " " +
                  (real ? std::to_string(*static_cast<float const*>(field.data))
                        : std::to_string(*static_cast<std::int32_t const*>(field.data))) +
                  "\n";
    }
    return g_text.c_str();
}

//! The plugin that the runtime would make from what this one serialises.
IPluginV3* harness_recreate(void* library, IPluginV3* plugin) {
    PluginFieldCollection const* const fields = runtimeOf(plugin)->getFieldsToSerialize();
    std::vector<char const*> names;
    std::vector<std::int32_t> types, lengths;
    std::vector<std::int64_t> values(static_cast<std::size_t>(fields->nbFields));
    std::vector<void const*> data;
    for (std::int32_t index = 0; index < fields->nbFields; ++index) {
        PluginField const& field = fields->fields[index];
        names.push_back(field.name);
        types.push_back(static_cast<std::int32_t>(field.type));
        lengths.push_back(field.length);
        std::memcpy(&values[static_cast<std::size_t>(index)], field.data, 4);  // as a plan would, not the same memory
        data.push_back(&values[static_cast<std::size_t>(index)]);
    }
    auto* const core = static_cast<IPluginV3OneCore*>(plugin->getCapabilityInterface(PluginCapabilityType::kCORE));
    return harness_create(library, core->getPluginName(), fields->nbFields, names.data(), types.data(), lengths.data(),
                          data.data());
}

IPluginV3* harness_clone(IPluginV3* plugin) { return plugin->clone(); }
IPluginV3* harness_attach(IPluginV3* plugin) { return runtimeOf(plugin)->attachToContext(nullptr); }
void harness_destroy(IPluginV3* plugin) { delete plugin; }
char const* harness_metadata(IPluginV3* plugin) { return buildOf(plugin)->getMetadataString(); }
std::int32_t harness_num_outputs(IPluginV3* plugin) { return buildOf(plugin)->getNbOutputs(); }
std::int32_t harness_aliased(IPluginV3* plugin, std::int32_t output) { return buildOf(plugin)->getAliasedInput(output); }

//! "kind major.minor" of core, build and runtime capability.
char const* harness_capabilities(IPluginV3* plugin) {
    g_text = std::string(plugin->getInterfaceInfo().kind) + "\n";
    for (auto type : {PluginCapabilityType::kCORE, PluginCapabilityType::kBUILD, PluginCapabilityType::kRUNTIME}) {
        InterfaceInfo const info = plugin->getCapabilityInterface(type)->getInterfaceInfo();
        g_text += std::string(info.kind) + " " + std::to_string(info.major) + "." + std::to_string(info.minor) + "\n";
    }
    return g_text.c_str();
}

//! Shapes of the outputs, one a line, dims separated by spaces. Dynamic dims of inputs are called by `symbols`
//! (8 per input). Null when the plugin refuses.
char const* harness_output_shapes(IPluginV3* plugin, TensorArg const* inputs, std::int32_t count,
                                  char const* const* symbols) {
    TextBuilder builder;
    std::vector<DimsExprs> shapes(static_cast<std::size_t>(count));
    for (std::int32_t input = 0; input < count; ++input) {
        DimsExprs& shape = shapes[static_cast<std::size_t>(input)];
        shape.nbDims = inputs[input].num_dims;
        for (std::int32_t axis = 0; axis < shape.nbDims; ++axis) {
            std::int64_t const value = inputs[input].dims[axis];
            shape.d[axis] = value < 0 ? builder.make(symbols[8 * input + axis], false, 0)
                                      : builder.make(std::to_string(value), true, value);
        }
    }
    std::int32_t const outputs = buildOf(plugin)->getNbOutputs();
    std::vector<DimsExprs> results(static_cast<std::size_t>(outputs));
    if (buildOf(plugin)->getOutputShapes(shapes.data(), count, nullptr, 0, results.data(), outputs, builder) != 0) {
        return nullptr;
    }
    g_text.clear();
    for (DimsExprs const& result : results) {
        for (std::int32_t axis = 0; axis < result.nbDims; ++axis) {
            g_text += (axis == 0 ? "" : " ") + static_cast<TextExpr const*>(result.d[axis])->text;
        }
        g_text += "\n";
    }
    return g_text.c_str();
}

std::int32_t harness_output_types(IPluginV3* plugin, std::int32_t const* inputs, std::int32_t count,
                                  std::int32_t* outputs) {
    return buildOf(plugin)->getOutputDataTypes(reinterpret_cast<DataType*>(outputs), buildOf(plugin)->getNbOutputs(),
                                               reinterpret_cast<DataType const*>(inputs), count);
}

std::int32_t harness_supports(IPluginV3* plugin, std::int32_t position, TensorArg const* tensors, std::int32_t inputs,
                              std::int32_t outputs) {
    std::vector<DynamicPluginTensorDesc> const descs = descsOf(tensors, inputs + outputs);
    return buildOf(plugin)->supportsFormatCombination(position, descs.data(), inputs, outputs) ? 1 : 0;
}

std::int32_t harness_configure(IPluginV3* plugin, TensorArg const* tensors, std::int32_t inputs, std::int32_t outputs) {
    std::vector<DynamicPluginTensorDesc> const descs = descsOf(tensors, inputs + outputs);
    return buildOf(plugin)->configurePlugin(descs.data(), inputs, descs.data() + inputs, outputs);
}

std::int64_t harness_workspace(IPluginV3* plugin, TensorArg const* tensors, std::int32_t inputs, std::int32_t outputs) {
    std::vector<DynamicPluginTensorDesc> const descs = descsOf(tensors, inputs + outputs);
    return static_cast<std::int64_t>(
        buildOf(plugin)->getWorkspaceSize(descs.data(), inputs, descs.data() + inputs, outputs));
}

//! onShapeChange, then enqueue on the default stream with the tensors' data.
std::int32_t harness_enqueue(IPluginV3* plugin, TensorArg const* tensors, std::int32_t inputs, std::int32_t outputs,
                             void* workspace) {
    std::vector<PluginTensorDesc> descs;
    std::vector<void*> data;
    for (std::int32_t index = 0; index < inputs + outputs; ++index) {
        descs.push_back(descOf(tensors[index]).desc);
        data.push_back(tensors[index].data);
    }
    if (runtimeOf(plugin)->onShapeChange(descs.data(), inputs, descs.data() + inputs, outputs) != 0) return -2;
    return runtimeOf(plugin)->enqueue(descs.data(), descs.data() + inputs, data.data(), data.data() + inputs, workspace,
                                      nullptr);
}
}
