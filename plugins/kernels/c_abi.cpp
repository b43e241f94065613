//! C entry points of the launchers, for callers that are not C++ (Python with a stream handle).
#include "c_abi.h"

#include "confidence_schedule.h"
#include "kv_append.h"
#include "markov_draft.h"
#include "ragged_accept.h"
#include "ragged_attention.h"
#include "round_state.h"

#include <cstdio>
#include <cstring>
#include <type_traits>

namespace {

using namespace dspark;

template <class Member>
char const* kindOf() {
    if (std::is_pointer<Member>::value) return "pointer";
    if (std::is_same<Member, float>::value) return "float32";
    return sizeof(Member) == 8 ? "int64" : "int32";
}

std::string fieldText(char const* name, std::size_t offset, std::size_t bytes, char const* kind) {
    return "  " + std::string(name) + " " + std::to_string(offset) + " " + std::to_string(bytes) + " " + kind + "\n";
}

#define FIELD(member) \
    text += fieldText(#member, offsetof(Params, member), sizeof(Params::member), kindOf<decltype(Params::member)>())

std::string opText(char const* op, std::size_t bytes) {
    return std::string(op) + " " + std::to_string(bytes) + "\n";
}

std::string kvAppendText() {
    using Params = KvAppendParams;
    std::string text = opText("kv_append", sizeof(Params));
    FIELD(num_tokens); FIELD(num_requests); FIELD(num_kv_heads); FIELD(head_dim); FIELD(num_pages); FIELD(page_size);
    FIELD(pages_per_request); FIELD(type); FIELD(key); FIELD(value); FIELD(token_request); FIELD(token_position);
    FIELD(page_table); FIELD(key_cache); FIELD(value_cache);
    return text;
}

std::string raggedAttentionText() {
    using Params = RaggedAttentionParams;
    std::string text = opText("ragged_attention", sizeof(Params));
    FIELD(num_tokens); FIELD(num_requests); FIELD(num_heads); FIELD(num_kv_heads); FIELD(head_dim); FIELD(num_pages);
    FIELD(page_size); FIELD(pages_per_request); FIELD(kv_split); FIELD(causal); FIELD(scale); FIELD(type);
    FIELD(query); FIELD(key_cache); FIELD(value_cache); FIELD(cu_tokens); FIELD(token_position); FIELD(page_table);
    FIELD(output); FIELD(workspace);
    return text;
}

std::string markovDraftText() {
    using Params = MarkovDraftParams;
    std::string text = opText("markov_draft", sizeof(Params));
    FIELD(num_requests); FIELD(draft_len); FIELD(vocab); FIELD(draft_vocab); FIELD(rank); FIELD(hidden_size);
    FIELD(head_kind); FIELD(acceptance); FIELD(num_candidates); FIELD(logits_type); FIELD(weight_type);
    FIELD(hidden_type); FIELD(base_logits); FIELD(hidden); FIELD(anchors); FIELD(positions); FIELD(temperature);
    FIELD(top_k); FIELD(top_p); FIELD(seed); FIELD(w1); FIELD(w2); FIELD(w1_scale); FIELD(w2_scale);
    FIELD(gate_weight); FIELD(gate_bias); FIELD(rnn_weight); FIELD(rnn_bias); FIELD(target_of_draft);
    FIELD(draft_of_target); FIELD(draft_tokens); FIELD(draft_entries); FIELD(draft_logits); FIELD(draft_laws);
    FIELD(draft_totals); FIELD(candidates); FIELD(status); FIELD(workspace);
    return text;
}

std::string confidenceScheduleText() {
    using Params = ConfidenceScheduleParams;
    std::string text = opText("confidence_schedule", sizeof(Params));
    FIELD(num_requests); FIELD(draft_len); FIELD(hidden_size); FIELD(num_rows); FIELD(table_len); FIELD(mode);
    FIELD(hidden_type); FIELD(hidden); FIELD(hidden_weight); FIELD(markov_table); FIELD(confidence_bias);
    FIELD(inv_temperature); FIELD(position_bias); FIELD(anchors); FIELD(positions); FIELD(draft_tokens); FIELD(caps);
    FIELD(live); FIELD(limits); FIELD(thresholds); FIELD(terms); FIELD(step_time_us); FIELD(confidence);
    FIELD(survival); FIELD(verify_len); FIELD(cu_tokens); FIELD(token_ids); FIELD(token_request);
    FIELD(token_position); FIELD(report); FIELD(workspace);
    return text;
}

std::string raggedAcceptText() {
    using Params = RaggedAcceptParams;
    std::string text = opText("ragged_accept", sizeof(Params));
    FIELD(num_tokens); FIELD(num_requests); FIELD(draft_len); FIELD(vocab); FIELD(draft_vocab); FIELD(num_candidates);
    FIELD(acceptance); FIELD(logits_type); FIELD(logits_stride); FIELD(target_logits); FIELD(cu_tokens);
    FIELD(draft_tokens); FIELD(draft_entries); FIELD(draft_logits); FIELD(draft_laws); FIELD(draft_totals);
    FIELD(candidates); FIELD(draft_of_target); FIELD(temperature); FIELD(top_k); FIELD(top_p); FIELD(seed);
    FIELD(positions); FIELD(out_tokens); FIELD(emitted_len); FIELD(status); FIELD(workspace);
    return text;
}

std::string roundBeginText() {
    using Params = RoundBeginParams;
    std::string text = opText("round_begin", sizeof(Params));
    FIELD(num_requests); FIELD(block_size); FIELD(mask_token); FIELD(anchors); FIELD(positions); FIELD(starts);
    FIELD(block_ids);
    return text;
}

std::string roundCapsText() {
    using Params = RoundCapsParams;
    std::string text = opText("round_caps", sizeof(Params));
    FIELD(num_requests); FIELD(active); FIELD(max_drafts); FIELD(remaining); FIELD(draft_status); FIELD(caps);
    FIELD(live);
    return text;
}

std::string roundRowsText() {
    using Params = RoundRowsParams;
    std::string text = opText("round_rows", sizeof(Params));
    FIELD(num_requests); FIELD(num_tokens); FIELD(row_len); FIELD(cu_tokens); FIELD(token_ids); FIELD(token_request);
    FIELD(token_position); FIELD(input_ids); FIELD(positions); FIELD(pack_index); FIELD(pad_index);
    return text;
}

std::string roundBanText() {
    using Params = RoundBanParams;
    std::string text = opText("round_ban", sizeof(Params));
    FIELD(num_requests); FIELD(num_tokens); FIELD(vocab); FIELD(max_banned); FIELD(cu_tokens); FIELD(positions);
    FIELD(ban_until); FIELD(banned); FIELD(logits);
    return text;
}

std::string roundCommitText() {
    using Params = RoundCommitParams;
    std::string text = opText("round_commit", sizeof(Params));
    FIELD(num_requests); FIELD(draft_len); FIELD(active); FIELD(out_tokens); FIELD(emitted_len); FIELD(anchors);
    FIELD(positions); FIELD(remaining);
    return text;
}

int64_t workspaceBytes(KvAppendParams const&) { return 0; }
int64_t workspaceBytes(RoundBeginParams const&) { return 0; }
int64_t workspaceBytes(RoundCapsParams const&) { return 0; }
int64_t workspaceBytes(RoundRowsParams const&) { return 0; }
int64_t workspaceBytes(RoundBanParams const&) { return 0; }
int64_t workspaceBytes(RoundCommitParams const&) { return 0; }
int64_t workspaceBytes(RaggedAttentionParams const& p) {
    return raggedAttentionWorkspaceBytes(p.num_tokens, p.num_heads, p.head_dim,
                                         static_cast<int64_t>(p.page_size) * p.pages_per_request, p.kv_split);
}
int64_t workspaceBytes(MarkovDraftParams const& p) {
    return markovDraftWorkspaceBytes(p.num_requests, p.vocab, p.draft_vocab, p.rank);
}
int64_t workspaceBytes(ConfidenceScheduleParams const& p) {
    return confidenceScheduleWorkspaceBytes(p.num_requests, p.draft_len);
}
int64_t workspaceBytes(RaggedAcceptParams const& p) {
    return raggedAcceptWorkspaceBytes(p.num_tokens, p.num_requests, p.vocab);
}

LaunchStatus launch(KvAppendParams const& p, cudaStream_t stream) { return launchKvAppend(p, stream); }
LaunchStatus launch(RaggedAttentionParams const& p, cudaStream_t stream) { return launchRaggedAttention(p, stream); }
LaunchStatus launch(MarkovDraftParams const& p, cudaStream_t stream) { return launchMarkovDraft(p, stream); }
LaunchStatus launch(ConfidenceScheduleParams const& p, cudaStream_t stream) {
    return launchConfidenceSchedule(p, stream);
}
LaunchStatus launch(RaggedAcceptParams const& p, cudaStream_t stream) { return launchRaggedAccept(p, stream); }
LaunchStatus launch(RoundBeginParams const& p, cudaStream_t stream) { return launchRoundBegin(p, stream); }
LaunchStatus launch(RoundCapsParams const& p, cudaStream_t stream) { return launchRoundCaps(p, stream); }
LaunchStatus launch(RoundRowsParams const& p, cudaStream_t stream) { return launchRoundRows(p, stream); }
LaunchStatus launch(RoundBanParams const& p, cudaStream_t stream) { return launchRoundBan(p, stream); }
LaunchStatus launch(RoundCommitParams const& p, cudaStream_t stream) { return launchRoundCommit(p, stream); }

//! Calls visit(params) with the struct that `op` names; false when there is no such op.
template <class Visit>
bool withParams(char const* op, void const* params, Visit const& visit) {
    if (std::strcmp(op, "kv_append") == 0) return visit(*static_cast<KvAppendParams const*>(params)), true;
    if (std::strcmp(op, "ragged_attention") == 0) {
        return visit(*static_cast<RaggedAttentionParams const*>(params)), true;
    }
    if (std::strcmp(op, "markov_draft") == 0) return visit(*static_cast<MarkovDraftParams const*>(params)), true;
    if (std::strcmp(op, "confidence_schedule") == 0) {
        return visit(*static_cast<ConfidenceScheduleParams const*>(params)), true;
    }
    if (std::strcmp(op, "ragged_accept") == 0) return visit(*static_cast<RaggedAcceptParams const*>(params)), true;
    if (std::strcmp(op, "round_begin") == 0) return visit(*static_cast<RoundBeginParams const*>(params)), true;
    if (std::strcmp(op, "round_caps") == 0) return visit(*static_cast<RoundCapsParams const*>(params)), true;
    if (std::strcmp(op, "round_rows") == 0) return visit(*static_cast<RoundRowsParams const*>(params)), true;
    if (std::strcmp(op, "round_ban") == 0) return visit(*static_cast<RoundBanParams const*>(params)), true;
    if (std::strcmp(op, "round_commit") == 0) return visit(*static_cast<RoundCommitParams const*>(params)), true;
    return false;
}

}  // namespace

char const* dspark_params_layout() noexcept {
    static std::string const text = kvAppendText() + raggedAttentionText() + markovDraftText() +
                                    confidenceScheduleText() + raggedAcceptText() + roundBeginText() +
                                    roundCapsText() + roundRowsText() + roundBanText() + roundCommitText();
    return text.c_str();
}

int64_t dspark_workspace_bytes(char const* op, void const* params) noexcept {
    int64_t bytes = -1;
    withParams(op, params, [&](auto const& typed) { bytes = workspaceBytes(typed); });
    return bytes;
}

int32_t dspark_launch(char const* op, void const* params, void* stream, char* message,
                      int64_t message_bytes) noexcept {
    LaunchStatus status = {Code::kBadArgument, "op", "a name of dspark_params_layout", 0, cudaSuccess};
    withParams(op, params, [&](auto const& typed) { status = launch(typed, static_cast<cudaStream_t>(stream)); });
    if (status.ok()) return 0;
    if (message != nullptr && message_bytes > 0) {
        std::snprintf(message, static_cast<std::size_t>(message_bytes), "%s: %s", op,
                      launchStatusText(status).c_str());
    }
    return status.error != cudaSuccess ? 1000 + static_cast<int32_t>(status.error)
                                       : static_cast<int32_t>(status.code);
}
