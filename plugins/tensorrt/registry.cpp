//! Exported symbols: what IPluginRegistry::loadLibrary looks for, the contract, and the last error.
#include "log.h"
#include "ops.h"

#include <memory>
#include <sstream>

#define DSPARK_EXPORT extern "C" __attribute__((visibility("default")))

namespace trtllm_dspark {
namespace {

std::string tensorText(TensorSpec const& spec) {
    std::string text = std::string(spec.name) + " [";
    for (std::size_t axis = 0; axis < spec.dims.size(); ++axis) {
        text += (axis == 0 ? "" : ", ") + dimText(spec.dims[axis]);
    }
    text += "] " + typesText(spec.type);
    for (When const& when : spec.when) {
        text += (&when == &spec.when.front() ? " when " : " and ") + whenText(when);
    }
    if (spec.aliases != nullptr) {
        text += " aliases " + std::string(spec.aliases);
    }
    return text;
}

std::string buildContract() {
    std::ostringstream out;
    for (OpDescription const* op : allOps()) {
        out << "plugin " << kNamespace << "::" << op->name << " version " << op->version << "\n";
        for (FieldSpec const& field : op->fields) {
            out << "  field " << field.name << (field.is_float ? " float32 " : " int32 ") << rangeText(field);
            if (!field.required) {
                out << " default " << field.fallback;
            }
            out << "\n";
        }
        for (TensorSpec const& spec : op->inputs) {
            out << "  input " << tensorText(spec) << "\n";
        }
        for (TensorSpec const& spec : op->outputs) {
            out << "  output " << tensorText(spec) << "\n";
        }
    }
    return out.str();
}

}  // namespace

std::vector<OpDescription const*> const& allOps() {
    static std::vector<OpDescription const*> const ops{&markovDraftOp(), &confidenceScheduleOp(), &raggedAcceptOp(),
                                                       &raggedAttentionOp(), &kvAppendOp()};
    return ops;
}

std::string const& contractText() {
    static std::string const text = buildContract();
    return text;
}

}  // namespace trtllm_dspark

DSPARK_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) { trtllm_dspark::setLoggerFinder(finder); }

DSPARK_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(std::int32_t& count) {
    using trtllm_dspark::OpCreator;
    struct Creators {
        std::vector<std::unique_ptr<OpCreator>> owned;
        std::vector<nvinfer1::IPluginCreatorInterface*> list;
    };
    static Creators const creators = [] {
        Creators made;
        for (trtllm_dspark::OpDescription const* op : trtllm_dspark::allOps()) {
            made.owned.push_back(std::make_unique<OpCreator>(*op));
            made.list.push_back(made.owned.back().get());
        }
        return made;
    }();
    count = static_cast<std::int32_t>(creators.list.size());
    return creators.list.data();
}

//! Canonical text of fields, tensors and versions of every plugin.
DSPARK_EXPORT char const* dspark_plugin_contract() { return trtllm_dspark::contractText().c_str(); }

//! This thread's last error message; empty when there was none.
DSPARK_EXPORT char const* dspark_plugin_last_error() { return trtllm_dspark::lastError(); }
