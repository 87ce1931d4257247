// Weights on disk: our tensors to files and back in both formats, all float types, and folders or
// files that do not hold what their configuration says.
#include <cmath>

#include "kernels/float16.h"
#include "kernels/rng.h"
#include "model/io.h"
#include "test/model/files.h"
#include "test/test.h"

using namespace torus;

namespace {

// A value that bf16 and fp16 hold exactly, different for each tensor and element.
float sample(const std::string& name, int64_t l, int64_t i) {
    const uint64_t stream = std::hash<std::string>()(name) + uint64_t(l);
    return float(int(random_bits(1, stream, uint64_t(i)) % 255) - 127) / 16;
}

void store(Tensor t, int64_t i, float x) {
    switch (t.dtype) {
        case DType::f64: t.as<double>()[i] = double(x); break;
        case DType::f32: t.as<float>()[i] = x; break;
        case DType::bf16: t.as<uint16_t>()[i] = float_to_bf16(x); break;
        case DType::f16: t.as<uint16_t>()[i] = float_to_f16(x); break;
        default: FAIL_TEST("not a float type");
    }
}

float load(Tensor t, int64_t i) {
    switch (t.dtype) {
        case DType::f64: return float(t.as<double>()[i]);
        case DType::f32: return t.as<float>()[i];
        case DType::bf16: return bf16_to_float(t.as<uint16_t>()[i]);
        default: return f16_to_float(t.as<uint16_t>()[i]);
    }
}

// Real rows are samples; padded rows are rubbish that must not survive a round trip.
void fill(const ParamSpec& spec, int64_t l, Tensor t) {
    for (int64_t i = 0; i < t.numel(); ++i) store(t, i, sample(spec.name, l, i));
}

struct Host {
    std::vector<char> bytes;
    Tensor tensor;
    Host(DType dtype, const Shape& shape)
        : bytes(size_t(shape.numel() * size_of(dtype)), char(0x55)),
          tensor(bytes.data(), dtype, shape) {}
};

template <class F>
void each_param(const ModelConfig& c, const F& f) {
    const ParamTable t = family(c.family).params(c);
    for (const ParamSpec& s : t.embed) f(s, 0);
    for (int64_t l = 0; l < c.L; ++l)
        for (const ParamSpec& s : t.layer) f(s, l);
    for (const ParamSpec& s : t.head) f(s, 0);
}

void write_safetensors(const std::string& path, const ModelConfig& c, DType dtype,
                       const std::string& prefix = "", const std::string& extra = "") {
    SafetensorsWriter w(path, {{"format", "pt"}});
    each_param(c, [&](const ParamSpec& s, int64_t l) {
        for (const HfTensor& t : hf_tensors(s, l)) w.add(prefix + t.name, dtype, t.shape);
    });
    if (!extra.empty()) w.add(extra, DType::f32, {0});
    each_param(c, [&](const ParamSpec& s, int64_t l) {
        Host ours(dtype, s.shape);
        fill(s, l, ours.tensor);
        const std::vector<HfTensor> parts = hf_tensors(s, l);
        for (size_t i = 0; i < parts.size(); ++i) {
            Host packed(dtype, parts[i].shape);
            pack_hf_part(s, i, ours.tensor, packed.tensor.data);
            w.write(packed.tensor.data, packed.tensor.bytes());
        }
    });
    w.finish();
}

// Every element of every tensor as fill() made it, padded rows 0.
void check_weights(const ModelConfig& c, const TensorSource& source, DType dtype,
                   const std::string& prefix = "") {
    each_param(c, [&](const ParamSpec& s, int64_t l) {
        Host read(dtype, s.shape);
        read_param(source, s, l, read.tensor, prefix);
        int64_t rows = 0;
        for (const HfPart& part : s.hf) rows += part.rows;
        const int64_t real = rows * (s.shape.numel() / s.shape[0]);
        int64_t wrong = 0;
        for (int64_t i = 0; i < s.shape.numel(); ++i)
            wrong += load(read.tensor, i) != (i < real ? sample(s.name, l, i) : 0.0f);
        CAPTURE(s.name);
        EXPECT_EQ(wrong, 0);
    });
}

ModelConfig small(const std::string& name) {
    ModelConfig c = model_preset(name);
    c.L = 2;
    c.C = 64;
    c.D = c.C / c.H;
    c.F = 4 * c.C;
    c.V = 131;  // padded to 256
    c.max_T = 40;
    return c;
}

}  // namespace

TEST_CASE("weights: every family through a folder, in every float type") {
    const TempFolder dir;
    const DType types[] = {DType::f64, DType::f32, DType::bf16, DType::f16};
    for (const std::string& name : family_names()) {
        ModelConfig c = small(name + ":tiny");
        c.tied = false;
        CAPTURE(name);
        write_hf_config(dir / "config.json", c);
        for (const DType file_type : types) {
            write_safetensors(dir / "model.safetensors", c, file_type);
            const OpenedModel m = open_model(dir.path());
            EXPECT_EQ(parameter_count(m.config), parameter_count(c));
            for (const DType type : types) check_weights(c, *m.weights, type);
        }
    }
}

TEST_CASE("weights: layout of the parts as the library stores them") {
    const ModelConfig g = small("gpt2:tiny");
    for (const ParamSpec& s : family("gpt2").params(g).layer) {
        if (s.name != "qkv_w") continue;
        const std::vector<HfTensor> parts = hf_tensors(s, 7);
        REQUIRE_TRUE(parts.size() == 1);
        EXPECT_EQ(parts[0].name, "transformer.h.7.attn.c_attn.weight");
        EXPECT((parts[0].shape == Shape{64, 192}));
        Host ours(DType::f32, s.shape), packed(DType::f32, parts[0].shape);
        fill(s, 0, ours.tensor);
        pack_hf_part(s, 0, ours.tensor, packed.tensor.data);
        // (in, out): element (3, 100) is the weight from input 3 to output 100
        EXPECT_EQ(load(packed.tensor, 3 * 192 + 100), load(ours.tensor, 100 * 64 + 3));
    }
    ModelConfig l = small("llama:tiny");
    l.qkv_bias = true;
    for (const ParamSpec& s : family("llama").params(l).layer) {
        if (s.name != "qkv_b") continue;
        const std::vector<HfTensor> parts = hf_tensors(s, 0);
        REQUIRE_TRUE(parts.size() == 3);
        EXPECT_EQ(parts[1].name, "model.layers.0.self_attn.k_proj.bias");
        EXPECT((parts[0].shape == Shape{64} && parts[1].shape == Shape{32}));
        Host ours(DType::f32, s.shape), packed(DType::f32, parts[1].shape);
        fill(s, 0, ours.tensor);
        pack_hf_part(s, 1, ours.tensor, packed.tensor.data);
        EXPECT_EQ(load(packed.tensor, 5), load(ours.tensor, 64 + 5));
    }
}

TEST_CASE("weights: prefixes, and names without the outer model") {
    const TempFolder dir;
    const ModelConfig c = small("gpt2:tiny");
    write_safetensors(dir / "opt.safetensors", c, DType::f32, "m.");
    check_weights(c, *open_safetensors(dir / "opt.safetensors"), DType::f64, "m.");
    // as the published GPT-2: "wte.weight", "h.0.attn.c_attn.weight"
    write_hf_config(dir / "config.json", c);
    write_safetensors(dir / "model.safetensors", c, DType::f32);
    std::string file = read_file(dir / "model.safetensors");
    for (size_t at; (at = file.find("\"transformer.")) != std::string::npos;)
        file = file.replace(at, 13, "\"").insert(file.find("}}") + 2, 12, ' ');
    write_file(dir / "model.safetensors", file);
    check_weights(c, *open_model(dir.path()).weights, DType::f32);
}

TEST_CASE("weights: folders that do not hold together") {
    const TempFolder dir;
    const ModelConfig c = small("llama:tiny");
    const auto error = [&] {
        return error_of([&] {
            const OpenedModel m = open_model(dir.path());
            each_param(m.config, [&](const ParamSpec& s, int64_t l) {
                Host host(DType::f32, s.shape);
                read_param(*m.weights, s, l, host.tensor);
            });
        });
    };
    EXPECT(error().starts_with("66 "));  // no config.json
    write_hf_config(dir / "config.json", c);
    EXPECT(error().starts_with("66 "));  // no weights
    write_safetensors(dir / "model.safetensors", c, DType::f32);
    EXPECT_EQ(error(), "none");

    const auto changed = [&](auto change) {
        ModelConfig other = c;
        change(other);
        write_hf_config(dir / "config.json", other);
        return error();
    };
    EXPECT(changed([](ModelConfig& o) { o.L = 1; }).find("\"model.layers.1.") != std::string::npos);
    EXPECT(changed([](ModelConfig& o) { o.L = 3; }).find("has no tensor \"model.layers.2.") !=
           std::string::npos);
    EXPECT(changed([](ModelConfig& o) { o.V = 130; }).find("expected (130, 64)") !=
           std::string::npos);
    EXPECT(changed([](ModelConfig& o) { o.tied = false; }).find("lm_head.weight") !=
           std::string::npos);
    EXPECT(changed([](ModelConfig& o) { o.Hk = 4; }).find("k_proj") != std::string::npos);
    write_hf_config(dir / "config.json", c);
    write_safetensors(dir / "model.safetensors", c, DType::f32, "",
                      "model.layers.0.self_attn.q_norm.weight");
    EXPECT(error().find("q_norm") != std::string::npos);
    write_safetensors(dir / "model.safetensors", c, DType::f32, "", "lm_head.weight");
    EXPECT_EQ(error(), "none");  // a tied head may be stored as well
    EXPECT(error_of([&] { open_model(dir / "nothing"); }).starts_with("66 "));
    EXPECT(error_of([&] { open_model(dir / "config.json"); }).starts_with("65 "));
}

TEST_CASE("weights: a tensor of integers is not read as floats") {
    const TempFolder dir;
    SafetensorsWriter w(dir / "x.safetensors");
    w.add("model.norm.weight", DType::i32, {64});
    const std::vector<int32_t> ones(64, 1);
    w.write(ones.data(), 256);
    w.finish();
    const ModelConfig c = small("llama:tiny");
    const ParamSpec norm = family("llama").params(c).head.back();
    Host host(DType::f32, norm.shape);
    const auto source = open_safetensors(dir / "x.safetensors");
    EXPECT(error_of([&] { read_param(*source, norm, 0, host.tensor); }).find("is int32") !=
           std::string::npos);
}

TEST_CASE("llm.c: round trip in both versions") {
    const TempFolder dir;
    const ModelConfig c = small("gpt2:tiny");
    for (const DType type : {DType::f32, DType::bf16}) {
        const std::string path = dir / "model.bin";
        write_llmc_model(path, c, type, fill);
        const OpenedModel m = open_model(path);
        EXPECT((m.config.L == c.L && m.config.C == c.C && m.config.H == c.H && m.config.V == c.V));
        EXPECT((m.config.max_T == c.max_T && m.config.F == 4 * c.C && m.config.tied));
        check_weights(c, *m.weights, DType::f32);
        check_weights(c, *m.weights, type);
        const std::string file = read_file(path);
        int32_t header[8];
        std::memcpy(header, file.data(), sizeof header);
        EXPECT_EQ(header[1], type == DType::f32 ? 3 : 5);
        EXPECT_EQ(header[7], 256);
        // wte is first and unstacked; qkv_w of layer 1 follows that of layer 0
        const int64_t elements = (int64_t(file.size()) - 1024) / size_of(type);
        EXPECT_EQ(elements, parameter_count(c) + (c.Vp() - c.V) * c.C);
        const Tensor all(const_cast<char*>(file.data()) + 1024, type, {elements});
        EXPECT_EQ(load(all, 77), sample("wte", 0, 77));
        const int64_t qkv = (c.Vp() + c.max_T) * c.C + 2 * c.L * c.C;
        EXPECT_EQ(load(all, qkv + 5), sample("qkv_w", 0, 5));
        EXPECT_EQ(load(all, qkv + 3 * c.C * c.C + 5), sample("qkv_w", 1, 5));
    }
}

TEST_CASE("llm.c: a vocabulary padded otherwise than ours") {
    const TempFolder dir;
    ModelConfig c = small("gpt2:tiny");
    write_llmc_model(dir / "a.bin", c, DType::f32, fill);
    std::string file = read_file(dir / "a.bin");
    const int32_t Vp = 140;
    std::memcpy(file.data() + 7 * 4, &Vp, 4);
    file.erase(size_t(1024 + Vp * c.C * 4), size_t((c.Vp() - Vp) * c.C * 4));
    write_file(dir / "b.bin", file);
    check_weights(c, *open_llmc_model(dir / "b.bin"), DType::f32);
}

TEST_CASE("llm.c: broken files") {
    const TempFolder dir;
    const std::string path = dir / "m.bin", broken = dir / "broken.bin";
    write_llmc_model(path, small("gpt2:tiny"), DType::f32, fill);
    const std::string whole = read_file(path);
    const auto error = [&](const std::string& bytes) {
        write_file(broken, bytes);
        return error_of([&] { open_model(broken); });
    };
    EXPECT_EQ(error(whole), "none");
    for (size_t n = 0; n < whole.size(); n += n < 1100 ? 1 : 4093)
        EXPECT(error(whole.substr(0, n)).starts_with("65 " + broken));
    EXPECT(error(whole.substr(0, whole.size() - 1)).starts_with("65 "));
    EXPECT(error(whole + "x").starts_with("65 "));
    for (size_t field = 0; field < 8; ++field)
        for (const int32_t value : {0, -1, 1, 7, 1 << 20, INT32_MAX, INT32_MIN}) {
            std::string bytes = whole;
            std::memcpy(bytes.data() + field * 4, &value, 4);
            CAPTURE(field);
            CAPTURE(value);
            // one head of 64 is a different model in a file of the same size; so are 7 words of 256
            if ((field == 5 || field == 3) && value > 0 && value <= 7 && 64 % value == 0) continue;
            if (field == 3 && value == 7) continue;
            EXPECT(error(bytes).starts_with("65 " + broken));
        }
    std::string swapped = whole;
    for (size_t i = 0; i < 1024; i += 4) {
        std::swap(swapped[i], swapped[i + 3]);
        std::swap(swapped[i + 1], swapped[i + 2]);
    }
    EXPECT(error(swapped).find("magic") != std::string::npos);
    ModelConfig untied = small("gpt2:tiny");
    untied.tied = false;
    EXPECT(error_of([&] { write_llmc_model(path, untied, DType::f32, fill); }).starts_with("64 "));
}
