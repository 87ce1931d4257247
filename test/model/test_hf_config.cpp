// config.json: published files are read as their authors meant them, everything that would change
// the maths is refused by name, and what we write is read back.
#include <nlohmann/json.hpp>

#include "model/io.h"
#include "test/model/files.h"
#include "test/test.h"

using namespace torus;
using nlohmann::json;

namespace {

// As published for Llama 3.2 1B, SmolLM2 135M, Qwen2.5 1.5B and GPT-2 (values; order and unused
// keys as they come).
const char* const llama32 = R"({"architectures":["LlamaForCausalLM"],"attention_bias":false,
"attention_dropout":0.0,"bos_token_id":128000,"eos_token_id":128001,"head_dim":64,
"hidden_act":"silu","hidden_size":2048,"initializer_range":0.02,"intermediate_size":8192,
"max_position_embeddings":131072,"mlp_bias":false,"model_type":"llama","num_attention_heads":32,
"num_hidden_layers":16,"num_key_value_heads":8,"pretraining_tp":1,"rms_norm_eps":1e-05,
"rope_scaling":{"factor":32.0,"high_freq_factor":4.0,"low_freq_factor":1.0,
"original_max_position_embeddings":8192,"rope_type":"llama3"},"rope_theta":500000.0,
"tie_word_embeddings":true,"torch_dtype":"bfloat16","transformers_version":"4.45.0.dev0",
"use_cache":true,"vocab_size":128256})";
const char* const smollm2 = R"({"architectures":["LlamaForCausalLM"],"attention_bias":false,
"attention_dropout":0.0,"bos_token_id":0,"eos_token_id":0,"hidden_act":"silu","hidden_size":576,
"initializer_range":0.041666666666666664,"intermediate_size":1536,"is_llama_config":true,
"max_position_embeddings":8192,"mlp_bias":false,"model_type":"llama","num_attention_heads":9,
"num_hidden_layers":30,"num_key_value_heads":3,"pretraining_tp":1,"rms_norm_eps":1e-05,
"rope_interleaved":false,"rope_scaling":null,"rope_theta":100000,"tie_word_embeddings":true,
"torch_dtype":"bfloat16","transformers_version":"4.40.1","use_cache":true,"vocab_size":49152})";
const char* const qwen25 = R"({"architectures":["Qwen2ForCausalLM"],"attention_dropout":0.0,
"bos_token_id":151643,"eos_token_id":151643,"hidden_act":"silu","hidden_size":1536,
"initializer_range":0.02,"intermediate_size":8960,"max_position_embeddings":131072,
"max_window_layers":28,"model_type":"qwen2","num_attention_heads":12,"num_hidden_layers":28,
"num_key_value_heads":2,"rms_norm_eps":1e-06,"rope_theta":1000000.0,"sliding_window":131072,
"tie_word_embeddings":true,"torch_dtype":"bfloat16","transformers_version":"4.40.1",
"use_cache":true,"use_mrope":false,"use_sliding_window":false,"vocab_size":151936})";
const char* const gpt2 = R"({"activation_function":"gelu_new","architectures":["GPT2LMHeadModel"],
"attn_pdrop":0.1,"bos_token_id":50256,"embd_pdrop":0.1,"eos_token_id":50256,
"initializer_range":0.02,"layer_norm_epsilon":1e-05,"model_type":"gpt2","n_ctx":1024,"n_embd":768,
"n_head":12,"n_layer":12,"n_positions":1024,"resid_pdrop":0.1,"summary_activation":null,
"summary_first_dropout":0.1,"summary_proj_to_labels":true,"summary_type":"cls_index",
"summary_use_proj":true,"task_specific_params":{"text-generation":{"do_sample":true,
"max_length":50}},"vocab_size":50257})";

bool same(const ModelConfig& a, const ModelConfig& b) {
    const RopeConfig &r = a.rope, &s = b.rope;
    return a.family == b.family && a.hf_model_type == b.hf_model_type && a.L == b.L && a.C == b.C &&
           a.H == b.H && a.Hk == b.Hk && a.D == b.D && a.F == b.F && a.V == b.V &&
           a.max_T == b.max_T && a.tied == b.tied && a.qkv_bias == b.qkv_bias &&
           a.norm_eps == b.norm_eps && a.init_std == b.init_std && r.theta == s.theta &&
           r.scaling == s.scaling && r.factor == s.factor &&
           r.low_freq_factor == s.low_freq_factor && r.high_freq_factor == s.high_freq_factor &&
           r.original_max_positions == s.original_max_positions;
}

struct Files {
    TempFolder dir;
    std::string path = dir / "config.json";
    ModelConfig read(const std::string& text) {
        write_file(path, text);
        return read_hf_config(path);
    }
    std::string error(const std::string& text) {
        return error_of([&] { read(text); });
    }
};

}  // namespace

TEST_CASE("config.json: published files equal our presets") {
    Files f;
    EXPECT(same(f.read(llama32), model_preset("llama3.2:1b")));
    EXPECT(same(f.read(smollm2), model_preset("smollm2:135m")));
    EXPECT(same(f.read(qwen25), model_preset("qwen2.5:1.5b")));
    EXPECT(same(f.read(gpt2), model_preset("gpt2:124M")));
}

TEST_CASE("config.json: both spellings of the rotary keys") {
    Files f;
    json j = json::parse(llama32);
    j["rope_parameters"] = j["rope_scaling"];
    j["rope_parameters"]["rope_theta"] = j["rope_theta"];
    EXPECT(f.error(j.dump()).find("keep one") != std::string::npos);
    j.erase("rope_scaling");
    j.erase("rope_theta");
    EXPECT(same(f.read(j.dump()), model_preset("llama3.2:1b")));

    j["rope_parameters"] = {{"rope_type", "linear"}, {"factor", 2}, {"rope_theta", 5e6}};
    const RopeConfig r = f.read(j.dump()).rope;
    EXPECT((r.scaling == RopeConfig::Scaling::linear && r.factor == 2 && r.theta == 5e6));
    j = json::parse(llama32);
    j["rope_scaling"] = {{"type", "linear"}, {"factor", 4.0}};
    EXPECT_EQ(f.read(j.dump()).rope.factor, 4);
    for (const char* type : {"yarn", "dynamic", "longrope", "su"}) {
        j["rope_scaling"] = {{"type", type}, {"factor", 4.0}};
        EXPECT(f.error(j.dump()).find(type) != std::string::npos);
    }
    j["rope_scaling"] = {{"rope_type", "linear"}};
    EXPECT(f.error(j.dump()).find("\"factor\" is missing") != std::string::npos);
    j["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 2}, {"attention_factor", 3}};
    EXPECT(f.error(j.dump()).find("attention_factor") != std::string::npos);
}

TEST_CASE("config.json: what would change the maths is refused by name") {
    Files f;
    struct {
        const char *base, *key;
        json value;
    } const cases[] = {
        {llama32, "final_logit_softcapping", 30.0},
        {llama32, "sliding_window", 4096},
        {llama32, "attention_bias", true},
        {llama32, "mlp_bias", true},
        {llama32, "hidden_act", "gelu"},
        {llama32, "partial_rotary_factor", 0.5},
        {llama32, "rope_interleaved", true},
        {llama32, "quantization_config", {{"bits", 4}}},
        {llama32, "num_experts", 8},
        {llama32, "layer_types", {"full_attention", "sliding_attention"}},
        {llama32, "hidden_size", "2048"},
        {llama32, "hidden_size", 2048.5},
        {llama32, "hidden_size", -2048},
        {llama32, "hidden_size", nullptr},
        {llama32, "vocab_size", 0},
        {llama32, "vocab_size", uint64_t(1) << 63},
        {llama32, "num_key_value_heads", 5},
        {llama32, "head_dim", 63},
        {llama32, "tie_word_embeddings", 1},
        {llama32, "rms_norm_eps", 0},
        {llama32, "rope_theta", "1e4"},
        {llama32, "model_type", "mistral"},
        {llama32, "rope_scaling", 3},
        {qwen25, "use_sliding_window", true},
        {qwen25, "use_mrope", true},
        {gpt2, "activation_function", "relu"},
        {gpt2, "scale_attn_by_inverse_layer_idx", true},
        {gpt2, "scale_attn_weights", false},
        {gpt2, "add_cross_attention", true},
        {gpt2, "n_embd", 770},
        {gpt2, "n_head", 0},
        {gpt2, "n_embd", int64_t(1) << 62},
        {gpt2, "n_layer", int64_t(1) << 40},
    };
    for (const auto& [base, key, value] : cases) {
        json j = json::parse(base);
        j[key] = value;
        CAPTURE(key);
        const std::string message = f.error(j.dump());
        CAPTURE(message);
        EXPECT(message.starts_with("65 " + f.path));
    }
    json j = json::parse(llama32);
    j["num_experts"] = 8;
    EXPECT(f.error(j.dump()).find("\"num_experts\" (8)") != std::string::npos);
    j = json::parse(qwen25);
    j["use_sliding_window"] = true;
    EXPECT(f.error(j.dump()).find("\"sliding_window\"") != std::string::npos);
    j = json::parse(llama32);
    j["sliding_window"] = nullptr;
    j["layer_types"] = json(16, "full_attention");
    EXPECT_EQ(f.error(j.dump()), "none");
    for (const char* required : {"hidden_size", "num_hidden_layers", "num_attention_heads",
                                 "intermediate_size", "vocab_size", "model_type"}) {
        j = json::parse(llama32);
        j.erase(required);
        CAPTURE(required);
        EXPECT(f.error(j.dump()).find(required) != std::string::npos);
    }
}

TEST_CASE("config.json: not even JSON") {
    Files f;
    const std::string whole = json::parse(llama32).dump();
    for (size_t n = 0; n < whole.size(); ++n)
        EXPECT(f.error(whole.substr(0, n)).starts_with("65 " + f.path));
    for (const char* text : {"[]", "3", "null", "{}", "{\"hidden_size\":1e999}",
                             "{\"model_type\":\"llama\",\"model_type\":\"gpt2\"}"}) {
        CAPTURE(text);
        EXPECT(f.error(text).starts_with("65 " + f.path));
    }
    EXPECT(f.error("{\"a\":" + std::string(100000, '[')).find("deeper than 64") !=
           std::string::npos);
    const std::string escape = f.error("{\"model_type\":\"\\u001b[31m\"}");
    EXPECT(escape.find('\x1b') == std::string::npos);
    EXPECT(error_of([&] { read_hf_config(f.dir / "none.json"); }).starts_with("66 "));
}

TEST_CASE("config.json: what we write is what we read, for every preset") {
    Files f;
    for (const std::string& name : model_preset_names()) {
        CAPTURE(name);
        ModelConfig c = model_preset(name);
        write_hf_config(f.path, c);
        EXPECT(same(read_hf_config(f.path), c));
        c.tied = !c.tied;
        c.norm_eps = 3e-7;
        c.rope.theta = c.family == "gpt2" ? c.rope.theta : 12345.678;
        write_hf_config(f.path, c);
        EXPECT(same(read_hf_config(f.path), c));
    }
    ModelConfig c = model_preset("llama:tiny");
    c.rope.scaling = RopeConfig::Scaling::linear;
    c.rope.factor = 1.5;
    c.D = 48;  // not C / H
    write_hf_config(f.path, c);
    EXPECT(same(read_hf_config(f.path), c));
}

TEST_CASE("config.json: the golden references") {
    const std::string golden = TORUS_SOURCE_DIR "/test/golden/";
    const ModelConfig g = read_hf_config(golden + "gpt2-tiny/config.json");
    EXPECT((g.L == 2 && g.C == 64 && g.H == 4 && g.F == 256 && g.V == 512 && g.tied));
    const ModelConfig l = read_hf_config(golden + "llama-tiny/config.json");
    EXPECT((l.Hk == 2 && l.D == 16 && !l.tied && l.norm_eps == 1e-6));
    EXPECT((l.rope.scaling == RopeConfig::Scaling::llama3 && l.rope.original_max_positions == 32));
    EXPECT_EQ(read_hf_config(golden + "llama-tied-masked/config.json").rope.theta, 500000);
}
