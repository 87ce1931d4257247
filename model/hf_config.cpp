// config.json of the Hugging Face library <-> ModelConfig. Every key belongs to one of four groups:
// read here; harmless whatever it says; harmless only with one value; unknown. The last is an
// error: a key that we do not know may change the maths, and a model that loads and computes
// something else is worse than one that does not load. Dropout rates are harmless: this engine
// never drops.
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <set>

#include "kernels/text.h"
#include "model/checked_file.h"
#include "model/io.h"
#include "model/strict_json.h"

namespace torus {
namespace {

using nlohmann::json;

constexpr const char* harmless[] = {"architectures",
                                    "attention_dropout",
                                    "attn_pdrop",
                                    "bos_token_id",
                                    "chunk_size_feed_forward",
                                    "do_sample",
                                    "dtype",
                                    "embd_pdrop",
                                    "eos_token_id",
                                    "gradient_checkpointing",
                                    "id2label",
                                    "is_llama_config",
                                    "label2id",
                                    "max_length",
                                    "max_sequence_length",
                                    "max_window_layers",
                                    "n_ctx",
                                    "output_attentions",
                                    "output_hidden_states",
                                    "output_past",
                                    "pad_token_id",
                                    "pretraining_tp",
                                    "reorder_and_upcast_attn",
                                    "repetition_penalty",
                                    "resid_pdrop",
                                    "return_dict",
                                    "sep_token_id",
                                    "summary_activation",
                                    "summary_first_dropout",
                                    "summary_proj_to_labels",
                                    "summary_type",
                                    "summary_use_proj",
                                    "task_specific_params",
                                    "temperature",
                                    "top_p",
                                    "torch_dtype",
                                    "transformers.js_config",
                                    "transformers_version",
                                    "unk_token_id",
                                    "use_cache"};

// Reads keys one by one and remembers them, so that what is left over can be named.
class Reader {
public:
    Reader(const json& object, std::string where) : object_(object), where_(std::move(where)) {
        require(object.is_object(), Exit::bad_data, where_, ": not a JSON object");
    }

    const json* find(const char* key) {  // absent and null are the same
        used_.insert(key);
        const auto it = object_.find(key);
        return it == object_.end() || it->is_null() ? nullptr : &*it;
    }
    int64_t integer(const char* key) {
        const json* v = find(key);
        require(v != nullptr, Exit::bad_data, where_, ": key \"", key, "\" is missing");
        return to_integer(key, *v);
    }
    int64_t integer(const char* key, int64_t fallback) {
        const json* v = find(key);
        return v ? to_integer(key, *v) : fallback;
    }
    double number(const char* key) {
        const json* v = find(key);
        require(v != nullptr, Exit::bad_data, where_, ": key \"", key, "\" is missing");
        return to_number(key, *v);
    }
    double number(const char* key, double fallback) {
        const json* v = find(key);
        return v ? to_number(key, *v) : fallback;
    }
    bool boolean(const char* key, bool fallback) {
        const json* v = find(key);
        if (!v) return fallback;
        require(v->is_boolean(), Exit::bad_data, where_, ": \"", key, "\" is ", shown(*v),
                ", allowed are true and false");
        return v->get<bool>();
    }
    std::string text(const char* key, const std::string& fallback) {
        const json* v = find(key);
        if (!v) return fallback;
        require(v->is_string(), Exit::bad_data, where_, ": \"", key, "\" is ", shown(*v),
                ", expected a string");
        return v->get<std::string>();
    }
    // The key may be absent; when there, only `allowed` is implemented here.
    void only(const char* key, std::initializer_list<json> allowed) {
        const json* v = find(key);
        if (!v || std::find(allowed.begin(), allowed.end(), *v) != allowed.end()) return;
        fail(Exit::bad_data, where_, ": \"", key, "\" is ", shown(*v), ", supported is ",
             allowed.begin()->dump(), "; this model cannot be run here");
    }
    void ignore(const char* key) { used_.insert(key); }
    void reject_unknown() const {
        for (const auto& [key, value] : object_.items()) {
            const bool known = used_.contains(key) || key.starts_with("_");
            require(known, Exit::bad_data, where_, ": unknown key ", excerpt(key), " (",
                    shown(value), ") may change what the model computes; remove it if it ",
                    "does not");
        }
    }
    const std::string& where() const { return where_; }

private:
    static std::string shown(const json& v) { return clipped(v.dump()); }
    int64_t to_integer(const char* key, const json& v) const {
        const bool fits = v.is_number_integer() &&
                          (!v.is_number_unsigned() || v.get<uint64_t>() <= uint64_t(INT64_MAX));
        require(fits, Exit::bad_data, where_, ": \"", key, "\" is ", shown(v),
                ", expected an integer");
        return v.get<int64_t>();
    }
    double to_number(const char* key, const json& v) const {
        require(v.is_number() && std::isfinite(v.get<double>()), Exit::bad_data, where_, ": \"",
                key, "\" is ", shown(v), ", expected a number");
        return v.get<double>();
    }

    const json& object_;
    std::string where_;
    std::set<std::string> used_;
};

// Two spellings: up to version 4 "rope_theta" and "rope_scaling" (null for none), from 5 on one
// object "rope_parameters" that holds theta too.
RopeConfig read_rope(Reader& r, const std::string& path) {
    RopeConfig rope;
    rope.theta = r.number("rope_theta", rope.theta);
    r.only("partial_rotary_factor", {1.0, 1});
    r.only("rope_interleaved", {false});
    const json* scaling = r.find("rope_scaling");
    const json* parameters = r.find("rope_parameters");
    require(!scaling || !parameters, Exit::bad_data, path,
            ": both \"rope_scaling\" and \"rope_parameters\" are given; keep one");
    const json* object = scaling ? scaling : parameters;
    if (!object) return rope;

    Reader s(*object, path + ": " + (scaling ? "rope_scaling" : "rope_parameters"));
    rope.theta = s.number("rope_theta", rope.theta);
    s.only("partial_rotary_factor", {1.0, 1});
    const std::string type = s.text("rope_type", s.text("type", "default"));
    s.ignore("type");
    if (type == "linear" || type == "llama3") {
        rope.scaling = RopeConfig::Scaling::linear;
        rope.factor = s.number("factor");
    } else {
        require(type == "default", Exit::bad_data, s.where(), ": rope_type is ", excerpt(type),
                ", supported are default, linear and llama3");
    }
    if (type == "llama3") {
        rope.scaling = RopeConfig::Scaling::llama3;
        rope.low_freq_factor = s.number("low_freq_factor");
        rope.high_freq_factor = s.number("high_freq_factor");
        rope.original_max_positions = s.number("original_max_position_embeddings");
    }
    s.reject_unknown();
    return rope;
}

ModelConfig read_gpt2(Reader& r) {
    ModelConfig c;
    c.family = "gpt2";
    c.L = r.integer("n_layer");
    c.C = r.integer("n_embd");
    c.H = c.Hk = r.integer("n_head");
    require(c.H > 0 && c.C % c.H == 0, Exit::bad_data, r.where(), ": n_embd = ", c.C,
            " is not a multiple of n_head = ", c.H);
    c.D = c.C / c.H;
    c.F = r.integer("n_inner", c.C > INT64_MAX / 4 ? c.C : 4 * c.C);
    c.V = r.integer("vocab_size");
    c.max_T = r.integer("n_positions");
    c.tied = r.boolean("tie_word_embeddings", true);
    c.qkv_bias = true;
    c.norm_eps = r.number("layer_norm_epsilon", 1e-5);
    c.init_std = r.number("initializer_range", 0.02);
    r.only("activation_function", {"gelu_new", "gelu_pytorch_tanh"});
    r.only("add_cross_attention", {false});
    r.only("scale_attn_weights", {true});
    r.only("scale_attn_by_inverse_layer_idx", {false});
    return c;
}

ModelConfig read_llama(Reader& r, const std::string& path, bool qwen2) {
    ModelConfig c;
    c.family = "llama";
    c.L = r.integer("num_hidden_layers");
    c.C = r.integer("hidden_size");
    c.H = r.integer("num_attention_heads");
    c.Hk = r.integer("num_key_value_heads", c.H);
    require(r.find("head_dim") || (c.H > 0 && c.C % c.H == 0), Exit::bad_data, path,
            ": hidden_size = ", c.C, " is not a multiple of num_attention_heads = ", c.H);
    c.D = r.integer("head_dim", c.H > 0 ? c.C / c.H : 0);
    c.F = r.integer("intermediate_size");
    c.V = r.integer("vocab_size");
    c.max_T = r.integer("max_position_embeddings");
    c.tied = r.boolean("tie_word_embeddings", false);
    c.qkv_bias = qwen2;
    c.norm_eps = r.number("rms_norm_eps", 1e-6);
    c.init_std = r.number("initializer_range", 0.02);
    c.rope = read_rope(r, path);
    r.only("hidden_act", {"silu"});
    r.only("attention_bias", {qwen2});  // of llama it would put a bias on the output too
    r.only("mlp_bias", {false});
    r.only("use_mrope", {false});
    if (!r.boolean("use_sliding_window", !qwen2))
        r.ignore("sliding_window");  // the library ignores it as well
    else
        r.only("sliding_window", {nullptr});
    if (const json* types = r.find("layer_types"))
        for (const json& type : *types)
            require(type == "full_attention", Exit::bad_data, path, ": \"layer_types\" has ",
                    clipped(type.dump()), ", supported is \"full_attention\"");
    return c;
}

}  // namespace

ModelConfig read_hf_config(const std::string& path) {
    const json file = read_json_file(path);
    Reader r(file, path);
    for (const char* key : harmless) r.ignore(key);
    const std::string type = r.text("model_type", "");
    ModelConfig c;
    if (type == "gpt2")
        c = read_gpt2(r);
    else if (type == "llama" || type == "qwen2")
        c = read_llama(r, path, type == "qwen2");
    else
        fail(Exit::bad_data, path, ": model_type is ", excerpt(type),
             ", supported are gpt2, llama and qwen2");
    c.hf_model_type = type;
    r.reject_unknown();
    try {
        validate(c);
    } catch (const Error& e) {
        fail(Exit::bad_data, path, ": ", e.what());
    }
    return c;
}

namespace {

// Special tokens are the tokenizer's affair: null, else the library would assume its own.
nlohmann::ordered_json gpt2_json(const ModelConfig& c) {
    return {{"architectures", {"GPT2LMHeadModel"}},
            {"model_type", "gpt2"},
            {"activation_function", "gelu_new"},
            {"n_layer", c.L},
            {"n_embd", c.C},
            {"n_head", c.H},
            {"n_inner", c.F},
            {"n_positions", c.max_T},
            {"vocab_size", c.V},
            {"layer_norm_epsilon", c.norm_eps},
            {"initializer_range", c.init_std},
            {"tie_word_embeddings", c.tied},
            {"bos_token_id", nullptr},
            {"eos_token_id", nullptr},
            {"attn_pdrop", 0.0},
            {"embd_pdrop", 0.0},
            {"resid_pdrop", 0.0}};
}

// The older spelling of the rotary keys: every version of the library reads it.
nlohmann::ordered_json llama_json(const ModelConfig& c) {
    const bool qwen2 = c.qkv_bias;
    nlohmann::ordered_json j = {
        {"architectures", {qwen2 ? "Qwen2ForCausalLM" : "LlamaForCausalLM"}},
        {"model_type", qwen2 ? "qwen2" : "llama"},
        {"hidden_act", "silu"},
        {"num_hidden_layers", c.L},
        {"hidden_size", c.C},
        {"num_attention_heads", c.H},
        {"num_key_value_heads", c.Hk},
        {"head_dim", c.D},
        {"intermediate_size", c.F},
        {"max_position_embeddings", c.max_T},
        {"vocab_size", c.V},
        {"rms_norm_eps", c.norm_eps},
        {"initializer_range", c.init_std},
        {"tie_word_embeddings", c.tied},
        {"bos_token_id", nullptr},
        {"eos_token_id", nullptr},
        {"attention_dropout", 0.0},
        {"rope_theta", c.rope.theta},
        {"rope_scaling", nullptr}};
    if (qwen2)
        j["use_sliding_window"] = false;
    else
        j["attention_bias"] = j["mlp_bias"] = false;
    auto& scaling = j["rope_scaling"];
    if (c.rope.scaling != RopeConfig::Scaling::none) scaling["factor"] = c.rope.factor;
    if (c.rope.scaling == RopeConfig::Scaling::linear) scaling["rope_type"] = "linear";
    if (c.rope.scaling == RopeConfig::Scaling::llama3) {
        scaling["rope_type"] = "llama3";
        scaling["low_freq_factor"] = c.rope.low_freq_factor;
        scaling["high_freq_factor"] = c.rope.high_freq_factor;
        scaling["original_max_position_embeddings"] = int64_t(c.rope.original_max_positions);
    }
    return j;
}

}  // namespace

void write_hf_config(const std::string& path, const ModelConfig& c) {
    const std::string text = (c.family == "gpt2" ? gpt2_json(c) : llama_json(c)).dump(2) + "\n";
    CheckedFile file(path);
    file.write(text.data(), int64_t(text.size()));
    file.finish();
}

}  // namespace torus
