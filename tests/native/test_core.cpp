// The lanes, the fp32 and bf16 products, LayerNorm, the activations and the threads, each against a
// plain loop that spells its definition out. Comparisons are of bits unless they say otherwise.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <thread>
#include <vector>

#include "check.h"
#include "gemm_float.h"
#include "norm.h"
#include "pool.h"
#include "vmath.h"

using namespace ns;

namespace {

// Numbers of all sizes: ordinary ones, extreme ones, denormals and zeros of both signs.
std::vector<float> difficult(Random& random, size_t n) {
  std::vector<float> x(n);
  for (float& value : x) {
    uint32_t bits = random.bits() << 1 ^ random.bits();
    switch (random.below(5)) {
      case 0: value = float_of(bits & 0x807fffffu); break;                   // a denormal
      case 1: value = float_of((bits & 0x80000000u)); break;                 // a zero
      case 2: value = float_of((bits & 0x80ffffffu) | 0x00800000u); break;   // nearly a denormal
      default: value = random.number();
    }
  }
  return x;
}

std::vector<uint16_t> bf16s(const std::vector<float>& x) {
  std::vector<uint16_t> y(x.size());
  std::transform(x.begin(), x.end(), y.begin(), [](float v) {
    return static_cast<uint16_t>(bits_of(v) >> 16);  // cut, so that bf16 denormals stay
  });
  return y;
}

// ---- Lanes.

void check_lane(const char* what, float got, float wanted, float a, float b) {
  const bool nan = std::isnan(got) && std::isnan(wanted);
  CHECK(nan || bits_of(got) == bits_of(wanted), "%s(%a, %a) = %a, wanted %a", what, a, b, got,
        wanted);
}

void test_arithmetic() {
  const FlushDenormals flush;
  Random random(1);
  for (int round = 0; round < 2000; ++round) {
    const auto a = difficult(random, kLanes), b = difficult(random, kLanes);
    const auto c = difficult(random, kLanes);
    float got[kLanes];
    auto compare = [&](const char* what, F32 lanes, const std::function<float(int)>& wanted) {
      store(got, lanes);
      for (int i = 0; i < kLanes; ++i) {
        volatile float want = wanted(i);
        check_lane(what, got[i], want, a[i], b[i]);
      }
    };
    const F32 x = load(a.data()), y = load(b.data()), z = load(c.data());
    compare("+", x + y, [&](int i) { return a[i] + b[i]; });
    compare("-", x - y, [&](int i) { return a[i] - b[i]; });
    compare("*", x * y, [&](int i) { return a[i] * b[i]; });
    compare("/", x / y, [&](int i) { return a[i] / b[i]; });
    compare("fma", fma(x, y, z), [&](int i) { return std::fma(a[i], b[i], c[i]); });
    compare("sqrt", sqrt(abs(x)), [&](int i) { return std::sqrt(std::fabs(a[i])); });
    const F32 two = splat(2.0f);  // what is only moved may stay a denormal until it is used
    compare("select", select(less(x, y), x, y) * two,
            [&](int i) { return (a[i] < b[i] ? a[i] : b[i]) * 2.0f; });
    compare("max", max(x, y) * two, [&](int i) { return (a[i] > b[i] ? a[i] : b[i]) * 2.0f; });
    compare("min", min(x, y) * two, [&](int i) { return (a[i] < b[i] ? a[i] : b[i]) * 2.0f; });
    compare("load_first", load_first(a.data(), round % 17),
            [&](int i) { return i < round % 17 ? a[i] : 0.0f; });
    const int n = round % 19 - 1;  // -1 .. 17
    CHECK(mask_bits(first_lanes(n)) == (1u << std::clamp(n, 0, kLanes)) - 1u, "first_lanes(%d)", n);
  }
}

void test_reductions() {
  Random random(2);
  for (int round = 0; round < 200; ++round) {
    auto x = random.floats(kLanes);
    auto sum = x, most = x;
    for (int width = 8; width >= 1; width /= 2)
      for (int i = 0; i < width; ++i) {
        sum[i] = sum[i] + sum[i + width];
        most[i] = std::max(most[i], most[i + width]);
      }
    check_lane("reduce_add", reduce_add(load(x.data())), sum[0], x[0], x[1]);
    check_lane("reduce_max", reduce_max(load(x.data())), most[0], x[0], x[1]);
  }
}

void test_halves() {
  for (int first = 0; first < 0x10000; first += kLanes) {
    uint16_t halves[kLanes], back[kLanes];
    float wide[kLanes];
    for (int i = 0; i < kLanes; ++i) halves[i] = static_cast<uint16_t>(first + i);
    store(wide, load_f16(halves));
    store_f16(back, load(wide));
    for (int i = 0; i < kLanes; ++i) {
      check_lane("f16", wide[i], float_of_f16(halves[i]), halves[i], 0);
      CHECK(std::isnan(wide[i]) || (back[i] == halves[i] && f16_of(wide[i]) == halves[i]),
            "half %04x came back as %04x and %04x", halves[i], back[i], f16_of(wide[i]));
    }
  }
}

void test_rounding_to_halves() {
  const FlushDenormals flush;
  Random random(3);
  for (int round = 0; round < 20000; ++round) {
    float x[kLanes];
    uint16_t f16[kLanes], bf16[kLanes];
    for (float& value : x) {
      uint32_t bits = random.bits() << 1 ^ random.bits();
      // Ties and the borders between exponents are what rounding gets wrong.
      if (random.below(2)) bits &= 0xffff8000u;
      if (random.below(2)) bits = (bits & 0x8fffffffu) | 0x30000000u;
      value = float_of(bits);
    }
    store_f16(f16, load(x));
    store_bf16(bf16, load(x));
    for (int i = 0; i < kLanes; ++i) {
      CHECK(f16[i] == f16_of(x[i]) || std::isnan(x[i]), "f16 of %a: %04x and %04x", x[i], f16[i],
            f16_of(x[i]));
      CHECK(bf16[i] == bf16_of(x[i]), "bf16 of %a: %04x and %04x", x[i], bf16[i], bf16_of(x[i]));
    }
  }
}

void test_integers() {
  Random random(4);
  for (int round = 0; round < 2000; ++round) {
    int32_t a[kLanes], b[kLanes], got[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      a[i] = static_cast<int32_t>(random.bits() << 1 ^ random.bits());
      b[i] = static_cast<int32_t>(random.bits() << 1 ^ random.bits());
    }
    store_i32(got, dot(load_i32(b), load_bytes(a), load_bytes(b)));
    for (int i = 0; i < kLanes; ++i) {
      uint32_t wanted = static_cast<uint32_t>(b[i]);
      for (int byte = 0; byte < 32; byte += 8)
        wanted += static_cast<uint32_t>(static_cast<int32_t>(static_cast<uint8_t>(a[i] >> byte)) *
                                        static_cast<int8_t>(b[i] >> byte));
      CHECK(got[i] == static_cast<int32_t>(wanted), "bytes: %d, wanted %u", got[i], wanted);
    }
    int8_t bytes[kLanes];
    store_i8(bytes, shift_right_signed<22>(load_i32(a)));
    for (int i = 0; i < kLanes; ++i)
      CHECK(bytes[i] == std::max(-128, std::min(127, a[i] >> 22)), "store_i8 of %d", a[i] >> 22);
    float x[kLanes];
    for (int i = 0; i < kLanes; ++i) x[i] = static_cast<float>(random.below(2000) - 1000) * 0.5f;
    store_i32(got, to_int(load(x)));
    for (int i = 0; i < kLanes; ++i)
      CHECK(got[i] == static_cast<int>(std::nearbyint(x[i])), "to_int(%g) = %d", x[i], got[i]);
  }
}

// Even halves low in each pair, odd ones high; stored as they are loaded.
void test_pairs() {
  Random random(9);
  for (int round = 0; round < 200; ++round) {
    uint16_t even[kLanes], odd[kLanes], both[2 * kLanes], zipped[2 * kLanes], kept[2 * kLanes];
    for (int i = 0; i < kLanes; ++i) {
      both[2 * i] = even[i] = static_cast<uint16_t>(random.bits());
      both[2 * i + 1] = odd[i] = static_cast<uint16_t>(random.bits());
    }
    store_pairs(zipped, zip(even, odd));
    store_pairs(kept, even_only(load_pairs(both)));
    for (int i = 0; i < kLanes; ++i) {
      CHECK(zipped[2 * i] == even[i] && zipped[2 * i + 1] == odd[i], "zip, column %d: %04x %04x", i,
            zipped[2 * i], zipped[2 * i + 1]);
      CHECK(kept[2 * i] == even[i] && kept[2 * i + 1] == 0, "even_only, column %d: %04x %04x", i,
            kept[2 * i], kept[2 * i + 1]);
    }
  }
}

// ---- Products.

// docs/EXACTNESS.md, one value at a time. Columns and rows are fp32, or bf16 if `pairs`.
float defined_dot(const std::vector<float>& x, const std::vector<float>& w, bool pairs) {
  const int K = static_cast<int>(x.size());
  float total = 0.0f;
  for (int block = 0; block < K; block += kBlockK) {
    volatile float sum = 0.0f;  // volatile: the compiler must not fold under other denormal rules
    const int stop = std::min(K, block + kBlockK);
    for (int k = block; k < stop; k += pairs ? 2 : 1) {
      if (pairs) sum = std::fma(k + 1 < K ? x[k + 1] : 0.0f, k + 1 < K ? w[k + 1] : 0.0f, sum);
      sum = std::fma(x[k], w[k], sum);
    }
    volatile float added = total + sum;
    total = block == 0 ? static_cast<float>(sum) : static_cast<float>(added);
  }
  return total;
}

struct Product {
  const Format& format;
  int K, num_rows;
  bool pairs;
  std::vector<float> columns, rows;  // [K][2 panels], [num_rows][K]

  Product(const Format& format, int K, int num_rows, bool pairs, Random& random)
      : format(format), K(K), num_rows(num_rows), pairs(pairs) {
    columns = difficult(random, static_cast<size_t>(K) * 2 * kPanel);
    rows = difficult(random, static_cast<size_t>(num_rows) * K);
  }

  float rounded(float x) const { return pairs ? float_of_bf16(bf16_of(x)) : x; }

  float wanted(int row, int column) const {
    std::vector<float> x(K), w(K);
    for (int k = 0; k < K; ++k) {
      x[k] = rounded(rows[static_cast<size_t>(row) * K + k]);
      w[k] = rounded(columns[static_cast<size_t>(k) * 2 * kPanel + column]);
    }
    return defined_dot(x, w, pairs);
  }

  std::vector<float> computed() const {
    const size_t panel_bytes = format.panel_bytes(K);
    const size_t row_bytes = pairs ? format.row_bytes(K) : K * sizeof(float);
    Memory panels(2 * panel_bytes), prepared(row_bytes * num_rows);
    std::vector<float> panel(static_cast<size_t>(K) * kPanel);
    for (int p = 0; p < 2; ++p) {
      for (int k = 0; k < K; ++k)
        std::copy_n(&columns[(static_cast<size_t>(k) * 2 + p) * kPanel], kPanel,
                    &panel[static_cast<size_t>(k) * kPanel]);
      format.pack(panel.data(), K, panels.data() + p * panel_bytes);
    }
    for (int m = 0; m < num_rows; ++m) {
      const float* row = &rows[static_cast<size_t>(m) * K];
      if (pairs)
        format.prepare(row, K, prepared.data() + m * row_bytes);
      else
        std::memcpy(prepared.data() + m * row_bytes, row, row_bytes);
    }
    std::vector<float> out(static_cast<size_t>(2) * num_rows * kPanel);
    for (int p = 0; p < 2; ++p)
      format.multiply({panels.data() + p * panel_bytes, K, prepared.data(), row_bytes, num_rows,
                       nullptr, &out[static_cast<size_t>(p) * num_rows * kPanel]});
    return out;
  }
};

void test_product(const Format& format, bool pairs) {
  const FlushDenormals flush;
  Random random(5);
  for (int K : {1, 2, 15, 64, 255, 256, 257, 511, 513, 768})
    for (int num_rows = 1; num_rows <= format.tile_rows; ++num_rows) {
      const Product product(format, K, num_rows, pairs, random);
      const auto got = product.computed();
      for (int i = 0; i < 2 * num_rows * kPanel; ++i) {
        const int column = i % kPanel + i / (num_rows * kPanel) * kPanel;
        const int row = i / kPanel % num_rows;
        if (K > 300 && (row + column) % 7) continue;  // a sample is enough where sums are long
        check_lane(format.name, got[i], product.wanted(row, column), K, num_rows);
      }
    }
}

// The border where a result is a denormal only before rounding is where hardware differs, if at
// all.
void test_bf16_denormals() {
  const FlushDenormals flush;
  Random random(6);
  for (int round = 0; round < 20000; ++round) {
    auto a = bf16s(difficult(random, 2 * kLanes)), b = bf16s(difficult(random, 2 * kLanes));
    const auto acc = difficult(random, kLanes);
    if (round % 2)  // products near the smallest normal number
      for (int i = 0; i < 2 * kLanes; ++i) {
        a[i] = static_cast<uint16_t>((a[i] & 0x807f) | 0x2000);
        b[i] = static_cast<uint16_t>((b[i] & 0x807f) | 0x1f80);
      }
    float got[kLanes];
    store(got, dot(load(acc.data()), load_pairs(a.data()), load_pairs(b.data())));
    for (int i = 0; i < kLanes; ++i) {
      volatile float odd =
          std::fma(float_of_bf16(a[2 * i + 1]), float_of_bf16(b[2 * i + 1]), acc[i]);
      volatile float even = std::fma(float_of_bf16(a[2 * i]), float_of_bf16(b[2 * i]), odd);
      check_lane("bf16 pair", got[i], even, acc[i], odd);
    }
  }
}

void test_unpacking() {
  Random random(7);
  const int K = 37;
  const auto columns = random.floats(static_cast<size_t>(K) * kPanel);
  for (const Format* format : {&kFloat32Format, &kBfloat16Format}) {
    Memory panel(format->panel_bytes(K));
    format->pack(columns.data(), K, panel.data());
    for (int n = 0; n < kPanel; ++n) {
      std::vector<float> column(K);
      format->unpack_column(panel.data(), K, n, column.data());
      for (int k = 0; k < K; ++k) {
        const float stored = columns[static_cast<size_t>(k) * kPanel + n];
        const bool is_bf16 = format == &kBfloat16Format;
        check_lane("unpack", column[k], is_bf16 ? float_of_bf16(bf16_of(stored)) : stored, k, n);
      }
    }
  }
}

// ---- Norm and activations, against double precision.

void test_layer_norm() {
  Random random(8);
  for (int C : {1, 2, 15, 16, 17, 48, 100, 768}) {
    auto x = random.floats(C), weight = random.floats(C), bias = random.floats(C);
    std::vector<float> out(C + kLanes, 7.0f);
    layer_norm(x.data(), weight.data(), bias.data(), C, 1e-5f, out.data());
    double mean = 0, variance = 0;
    for (float value : x) mean += value / static_cast<double>(C);
    for (float value : x) variance += (value - mean) * (value - mean) / C;
    for (int i = 0; i < C; ++i) {
      const double wanted = (x[i] - mean) / std::sqrt(variance + 1e-5) * weight[i] + bias[i];
      CHECK(std::fabs(out[i] - wanted) < 1e-5, "layer_norm C %d: %g, wanted %g", C, out[i], wanted);
    }
    CHECK(out[C + kLanes - 1] == 7.0f || C % kLanes == 1, "layer_norm wrote past its row");
  }
}

// `tolerance` is relative, above an absolute error of a hundredth of it.
void test_function(const char* name, const std::function<F32(F32)>& function,
                   const std::function<double(double)>& wanted, double tolerance) {
  for (double x = -20.0; x < 20.0; x += 1.0 / 512) {
    const float at = static_cast<float>(x);
    float got[kLanes];
    store(got, function(splat(at)));
    const double want = wanted(at);
    CHECK(std::fabs(got[0] - want) <= tolerance * std::fabs(want) + tolerance * 0.01,
          "%s(%g) = %.9g, wanted %.9g", name, x, got[0], want);
    CHECK(bits_of(got[0]) == bits_of(got[kLanes - 1]), "%s: lanes differ at %g", name, x);
  }
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

void test_activations() {
  test_function("exp", [](F32 x) { return exp(x); }, [](double x) { return std::exp(x); }, 2.5e-7);
  test_function("gelu_tanh", [](F32 x) { return gelu_tanh(x); }, [](double x) {
    return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
  }, 1e-6);
  test_function("gelu_erf", [](F32 x) { return gelu_erf(x); },
                [](double x) { return x / 2 * std::erfc(-x / std::sqrt(2.0)); }, 2e-6);
  test_function("quick_gelu", [](F32 x) { return quick_gelu(x); },
                [](double x) { return x * sigmoid(1.702 * x); }, 2e-6);
  test_function("silu", [](F32 x) { return silu(x); }, [](double x) { return x * sigmoid(x); },
                1e-6);
  test_function("tanh", [](F32 x) { return tanh(x); }, [](double x) { return std::tanh(x); }, 4e-7);
  test_function("relu", [](F32 x) { return relu(x); }, [](double x) { return std::max(x, 0.0); },
                0);
}

void test_nan_comes_through() {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (int activation = NS_GELU_TANH; activation <= NS_TANH; ++activation)
    with_activation(activation, [&](auto act) {
      float got[kLanes];
      store(got, act(splat(nan)));
      CHECK(std::isnan(got[0]), "activation %d hides NaN", activation);
    });
  const float lowest = -std::numeric_limits<float>::infinity();
  float got[kLanes];
  store(got, exp(splat(lowest)));
  CHECK(bits_of(got[0]) == 0, "exp(-inf) = %g", got[0]);
}

// ---- Threads.

void test_each_chunk_once() {
  for (int num_threads : {1, 2, 3, 5}) {
    Pool pool(num_threads);
    for (int job = 0; job < 3000; ++job) {
      const int num_chunks = job % 40;
      std::vector<std::atomic<int>> calls(num_chunks);
      std::atomic<bool> good{true};
      pool.run(num_chunks, [&](int chunk, int thread) {
        if (thread < 0 || thread >= num_threads) good = false;
        calls[chunk].fetch_add(1);
      });
      for (const auto& count : calls) good = good && count.load() == 1;
      CHECK(good.load(), "%d threads, %d chunks: a chunk ran never, or twice", num_threads,
            num_chunks);
    }
  }
}

// More chunks than the words that are fought over can count.
void test_a_job_of_millions() {
  Pool pool(2);
  constexpr int kChunks = 2 * Pool::kMaxChunks + 3;
  std::vector<uint8_t> calls(kChunks, 0);
  pool.run(kChunks, [&](int chunk, int) { ++calls[chunk]; });
  CHECK(std::count(calls.begin(), calls.end(), 1) == kChunks, "a chunk ran never, or twice");
}

// Whoever holds a slow chunk must not keep the others waiting, and sleeping threads must wake: the
// first chunk returns only once all the rest did, half of which belonged to the same thread.
void test_stealing_and_sleeping() {
  using namespace std::chrono_literals;
  constexpr int kChunks = 16;
  Pool pool(2);
  for (int round = 0; round < 10; ++round) {
    std::this_thread::sleep_for(2ms);  // the other thread sleeps by now
    std::atomic<int> others{0};
    const auto limit = std::chrono::steady_clock::now() + 10s;
    pool.run(kChunks, [&](int chunk, int) {
      if (chunk != 0) return void(others.fetch_add(1));
      while (others.load() < kChunks - 1 && std::chrono::steady_clock::now() < limit)
        std::this_thread::sleep_for(100us);
      CHECK(others.load() == kChunks - 1, "%d chunks waited for another", others.load());
    });
  }
}

[[maybe_unused]] void test_fork() {
  Pool pool(2);
  pool.run(8, [](int, int) {});
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    bool good = pool.belongs_to_another_process();
    std::atomic<int> calls{0};
    {
      Pool own(2);
      own.run(8, [&](int, int) { calls.fetch_add(1); });
    }
    _exit(good && calls == 8 ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "threads in a forked child: %d", status);
  CHECK(!pool.belongs_to_another_process(), "the parent's pool is its own");
}

}  // namespace

int main() {
  test_arithmetic();
  test_reductions();
  test_halves();
  test_rounding_to_halves();
  test_integers();
  test_pairs();
  test_product(kFloat32Format, false);
  test_product(kBfloat16Format, true);
  check_panels(kBfloat16Format);
  test_bf16_denormals();
  test_unpacking();
  test_layer_norm();
  test_activations();
  test_nan_comes_through();
  test_each_chunk_once();
  test_a_job_of_millions();
  test_stealing_and_sleeping();
#if !defined(__SANITIZE_THREAD__)  // which cannot follow threads into a forked child
  test_fork();
#endif
  std::printf("%s: %d failures\n", kIsa, failures());
  return failures() != 0;
}
