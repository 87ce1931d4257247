// Tests of ops as a table: a case names its tensors and says how to call forward and backward; the
// loops in ops_test.cpp then check every case against finite differences, fp32 against fp64,
// pitched against contiguous tensors, one thread against several, BLAS against plain loops, and
// that wrong arguments throw. A new op is tested by one more row in cases.cpp.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace torus::test {

// A host tensor with its memory. With `pitched`, rows of every dimension lie apart; the gaps hold a
// pattern that must survive.
class Value {
public:
    Value() = default;
    Value(DType dtype, const Shape& shape, bool pitched = false);
    Tensor tensor() const;
    int64_t size() const { return view_.numel(); }
    double get(int64_t i) const;  // i counts elements in row-major order
    void set(int64_t i, double v);
    void set_all(const std::function<double(int64_t)>& f);
    std::vector<double> all() const;
    bool gaps_intact() const;

private:
    int64_t offset(int64_t i) const;
    Tensor view_;
    mutable std::vector<uint64_t> memory_;
};

// Reproducible random numbers of mean 0 and variance 1: element i of the tensor called `name`.
double noise(const std::string& name, int64_t i);
Value random_value(const std::string& name, DType dtype, const Shape& shape, double size = 1,
                   bool pitched = false);

enum class Kind {
    input,     // float, differentiable; backward fills "d" + name
    constant,  // float, not differentiable
    output,    // float, enters the loss with weights "d" + name
    stat,      // float, written by forward, read by backward, does not enter the loss
};
enum class Grad { none, adds, writes };  // what backward does to an input's gradient

struct Spec {
    std::string name;
    Shape shape;
    Kind kind = Kind::input;
    Grad grad = Grad::none;
    bool pitched = false;   // the op takes a pitch
    bool optional = false;  // the op takes an absent tensor
    double size = 1;        // of the random numbers
    double weight = 0;      // of an output in the loss; 0: random ones
    bool f64 = false;       // in fp64 on every backend
};

struct Indices {
    std::string name;
    Shape shape;
    std::vector<int32_t> values;
    bool optional = false, pitched = false;
};

class Run;
struct OpCase {
    std::string name;
    std::vector<std::string> ops;  // the members of Kernels that this case tests
    std::vector<Spec> tensors;
    std::vector<Indices> indices;
    std::function<void(Run&)> forward;
    std::function<void(Run&)> backward;  // none: forward only
};

// All cases; `big` makes them large enough for several threads and tiles.
std::vector<OpCase> all_cases(bool big);
// Members of Kernels that tests outside the table cover.
struct Covers {
    Covers(std::initializer_list<const char*> ops);
    static std::vector<std::string>& list();
};

// The tensors of one case, filled: inputs with noise, outputs and overwritten gradients with NaN.
class Run {
public:
    Run(const OpCase& c, Kernels& k, bool pitched = false);
    Kernels& k;
    Stream stream;

    Tensor operator[](const std::string& name) const;  // absent if the case has no such tensor
    Value& value(const std::string& name) { return values_.at(name); }
    std::vector<std::string> names() const;
    void replace(const std::string& name, const Tensor& t) { replaced_[name] = t; }

    // For ops that work in place: dst = src, which must be alike in type, shape and strides.
    void copy(const std::string& dst, const std::string& src);
    void forward() { case_.forward(*this); }
    void backward() { case_.backward(*this); }
    double loss() const;  // sum over outputs of weights * output
    // Outputs, stats and gradients by name.
    std::map<std::string, std::vector<double>> results() const;
    std::vector<double> gradient(const std::string& input) const;  // what backward added
    bool gaps_intact() const;

private:
    const OpCase& case_;
    std::map<std::string, Value> values_;
    std::map<std::string, Tensor> replaced_;
};

// ||a - b|| / ||b||, or ||a - b|| when b is 0.
double relative_error(const std::vector<double>& a, const std::vector<double>& b);
// Equal bit for bit (NaN equals NaN).
bool same_bits(const std::vector<double>& a, const std::vector<double>& b);
// Runs f with OpenMP set to n threads.
void with_threads(int n, const std::function<void()>& f);

}  // namespace torus::test
