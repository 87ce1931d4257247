// The references of test/golden, made by another program in fp64 (see docs on the reference
// format): logits, loss and every gradient of a whole model, from the weights of its Hugging Face
// folder.
#include <cmath>

#include "test/model/net.h"
#include "test/test.h"

using namespace torus;

namespace {

void copy_ids(Tensor from, Tensor to) {  // i64 -> i32
    REQUIRE_TRUE(from.numel() == to.numel());
    for (int64_t i = 0; i < from.numel(); ++i) to.as<int32_t>()[i] = int32_t(from.as<int64_t>()[i]);
}

}  // namespace

TEST_CASE("golden references: logits, loss and gradients in fp64") {
    for (const char* name : {"gpt2-tiny", "llama-tiny", "llama-tied-masked"}) {
        CAPTURE(name);
        const std::string folder = std::string(TORUS_SOURCE_DIR "/test/golden/") + name;
        const OpenedModel model = open_model(folder);
        const auto reference = open_safetensors(folder + "/reference.safetensors");
        const Tensor ids = reference->find("input_ids");
        Net net(model.config, ids.dim(0), ids.dim(1));
        net.load(*model.weights);
        copy_ids(ids, net.ids());
        copy_ids(reference->find("targets"), net.targets());
        int64_t valid = 0;
        for (int64_t i = 0; i < ids.numel(); ++i) valid += net.targets().as<int32_t>()[i] >= 0;
        net.dloss = 1.0 / double(valid);

        const double expected = reference->find("loss").as<double>()[0];
        EXPECT(std::abs(net.loss() / expected - 1) <= 1e-10);
        EXPECT(relative_difference(net.logits(), reference->find("logits")) <= 1e-10);
        EXPECT(std::abs(net.loss_and_gradients() / expected - 1) <= 1e-10);
        for (const std::string& parameter : net.names()) {
            CAPTURE(parameter);
            const ParamSpec& spec = net.spec(parameter);
            std::vector<double> storage(size_t(spec.shape.numel()));
            const Tensor gradient(storage.data(), DType::f64, spec.shape);
            read_param(*reference, spec, net.layer_of(parameter), gradient, "grad.");
            EXPECT(relative_difference(net.gradient(parameter), gradient) <= 1e-9);
        }
    }
}
