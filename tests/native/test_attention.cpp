// Attention and the KV cache: against a plain double-precision loop over what is stored, bit for
// bit against the definition in docs/EXACTNESS.md, and bit for bit between layouts, ways of cutting
// a prefill and positions of a batch. The digest of the last line must be the same on every
// instruction set.

#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "check.h"

using namespace ns;

namespace {

struct Case {
  int dtype, head_size, context, block_size;
};

// A sequence of random rows [context][2 heads * D] in a cache full of NaN, blocks in random order.
struct Sequence {
  Case c;
  int heads = 2, width;
  std::vector<float> q, k, v;
  std::vector<int32_t> table, slots;
  KvCache cache;
  float scale;

  explicit Sequence(const Case& c)
      : c(c), width(heads * c.head_size),
        cache(2, heads, c.head_size, c.block_size, blocks_of(c) + 3, c.dtype),
        scale(1.0f / std::sqrt(static_cast<float>(c.head_size))) {
    Random random(static_cast<uint64_t>(c.head_size * 1000 + c.context));
    for (auto* rows : {&q, &k, &v}) *rows = random.floats(static_cast<size_t>(c.context) * width);
    for (float& x : q) x *= 3.0f;
    for (int i = 0; i < cache.num_blocks; ++i) cache.poison(i);
    table = random.permutation(cache.num_blocks);
    for (int p = 0; p < c.context; ++p)
      slots.push_back(table[p / c.block_size] * c.block_size + p % c.block_size);
  }

  static int blocks_of(const Case& c) { return (c.context + c.block_size - 1) / c.block_size; }

  void append(int first, int count) {
    for (int head = 0; head < heads; ++head) {
      size_t at = static_cast<size_t>(first) * width + head * c.head_size;
      cache.append(1, head, &k[at], &v[at], width, &slots[first], count);
    }
  }

  // Attends queries first .. first + count - 1 of every head into `out` [context][width].
  void attend(int first, int count, std::vector<float>& out) const {
    std::vector<uint8_t> memory(attend_scratch_bytes(cache, c.context) + 64);
    uint8_t* scratch = memory.data();
    scratch += (64 - reinterpret_cast<uintptr_t>(scratch) % 64) % 64;
    for (int head = 0; head < heads; ++head) {
      size_t at = static_cast<size_t>(first) * width + head * c.head_size;
      AttendTask task{1,     head,      table.data(), first + count, count,
                      &q[at], width, &out[at],     width,         scale};
      ns::attend(cache, task, scratch);
    }
  }

  // Prefill in steps of `step` queries.
  std::vector<float> run(int step) {
    std::vector<float> out(q.size());
    for (int first = 0; first < c.context; first += step) {
      int count = std::min(step, c.context - first);
      append(first, count);
      attend(first, count, out);
    }
    return out;
  }
};

// What a head's row becomes in the cache, as doubles.
std::vector<double> stored(const Case& c, const float* row) {
  std::vector<double> values(row, row + c.head_size);
  float largest = 0;
  for (int d = 0; d < c.head_size; ++d) largest = std::max(largest, std::fabs(row[d]));
  const float scale = float_of_f16(f16_of(largest / 127.0f));
  for (int d = 0; d < c.head_size; ++d) {
    if (c.dtype == NS_BFLOAT16) values[d] = float_of_bf16(bf16_of(row[d]));
    if (c.dtype == NS_FLOAT16) values[d] = float_of_f16(f16_of(row[d]));
    if (c.dtype != NS_INT8) continue;
    const float steps = std::nearbyint(row[d] / scale);
    values[d] = static_cast<double>(scale) * std::max(-127.0f, std::min(127.0f, steps));
  }
  return values;
}

std::vector<double> reference(const Sequence& s, int row, int head) {
  const Case& c = s.c;
  size_t at = static_cast<size_t>(head) * c.head_size;
  std::vector<double> scores, out(static_cast<size_t>(c.head_size), 0.0);
  double top = -1e300, sum = 0;
  for (int t = 0; t <= row; ++t) {
    const std::vector<double> key = stored(c, &s.k[t * s.width + at]);
    double score = 0;
    for (int d = 0; d < c.head_size; ++d)
      score += static_cast<double>(s.q[row * s.width + at + d]) * key[d];
    scores.push_back(score * s.scale);
    top = std::max(top, scores.back());
  }
  for (int t = 0; t <= row; ++t) {
    const std::vector<double> value = stored(c, &s.v[t * s.width + at]);
    double weight = std::exp(scores[t] - top);
    sum += weight;
    for (int d = 0; d < c.head_size; ++d) out[d] += weight * value[d];
  }
  for (double& x : out) x /= sum;
  return out;
}

// sum of a[i] b[i] as docs/EXACTNESS.md has it: blocks of 256, ascending; bf16 in pairs, the odd
// one first.
float defined_sum(const std::vector<float>& a, const std::vector<float>& b, bool in_pairs) {
  const size_t n = a.size();
  auto add = [&](float sum, size_t i) { return i < n ? std::fma(a[i], b[i], sum) : sum; };
  float total = 0;
  for (size_t block = 0; block < n; block += 256) {
    float sum = 0;
    for (size_t i = block; i < std::min(n, block + 256); i += in_pairs ? 2 : 1)
      sum = in_pairs ? add(add(sum, i + 1), i) : add(sum, i);
    total = block == 0 ? sum : total + sum;
  }
  return total;
}

float defined_exp(float x) {
  float lanes[kLanes];
  store(lanes, ns::exp(splat(x)));
  return lanes[0];
}

// One query's result by the definition, in scalar loops; the formats that are floats only.
std::vector<float> defined(const Sequence& s, int row, int head) {
  const Case& c = s.c;
  const bool in_pairs = c.dtype == NS_BFLOAT16;
  auto operand = [&](float x) { return in_pairs ? float_of_bf16(bf16_of(x)) : x; };
  auto at = [&](const std::vector<float>& rows, int t) {
    return &rows[static_cast<size_t>(t) * s.width + head * c.head_size];
  };
  std::vector<float> q, p, out;
  for (int d = 0; d < c.head_size; ++d) q.push_back(operand(at(s.q, row)[d] * s.scale));
  for (int t = 0; t <= row; ++t) {
    const std::vector<double> key = stored(c, at(s.k, t));
    p.push_back(defined_sum(q, std::vector<float>(key.begin(), key.end()), in_pairs));
  }
  const float top = *std::max_element(p.begin(), p.end());
  float lanes[kLanes] = {};
  for (int t = 0; t <= row; ++t) {
    p[t] = defined_exp(p[t] - top);
    lanes[t % kLanes] += p[t];
    p[t] = operand(p[t]);
  }
  const float inverse_sum = 1.0f / reduce_add(load(lanes));
  std::vector<std::vector<float>> columns(c.head_size);
  for (int t = 0; t <= row; ++t) {
    const std::vector<double> value = stored(c, at(s.v, t));
    for (int d = 0; d < c.head_size; ++d) columns[d].push_back(static_cast<float>(value[d]));
  }
  for (const std::vector<float>& column : columns)
    out.push_back(defined_sum(p, column, in_pairs) * inverse_sum);
  return out;
}

// bf16 rounds queries and weights too, each once, to 8 bits.
double tolerance_of(int dtype) {
  return dtype == NS_INT8 ? 4e-4 : dtype == NS_BFLOAT16 ? 1e-2 : 4e-6;
}

void check_against_reference(const Case& c) {
  Sequence s(c);
  std::vector<float> out = s.run(c.context);
  const double tolerance = tolerance_of(c.dtype);
  for (int row = 0; row < c.context; row += 1 + c.context / 9)
    for (int head = 0; head < s.heads; ++head) {
      std::vector<double> expected = reference(s, row, head);
      for (int d = 0; d < c.head_size; ++d) {
        double got = out[static_cast<size_t>(row) * s.width + head * c.head_size + d];
        CHECK(std::fabs(got - expected[d]) <= tolerance,
              "dtype %d D %d N %d B %d row %d d %d: %g, %g", c.dtype, c.head_size, c.context,
              c.block_size, row, d, got, expected[d]);
      }
      if (c.dtype == NS_INT8) continue;
      const float* got = &out[static_cast<size_t>(row) * s.width + head * c.head_size];
      CHECK(same_bits(std::vector<float>(got, got + c.head_size), defined(s, row, head)),
            "dtype %d D %d N %d B %d row %d: not the bits of the definition", c.dtype, c.head_size,
            c.context, c.block_size, row);
    }
}

// Every block size with every way of cutting a prefill. Of long contexts, which are dear, each block
// size has one way, and all of both come.
constexpr int kAllPairsUpTo = 130;

void check_bits(int dtype, int head_size, int context) {
  const std::vector<float> first = Sequence({dtype, head_size, context, 16}).run(1);
  const int steps[] = {1, 2, 7, 33, 65, context};
  constexpr int kWays = 6;
  int turn = 0;
  for (int block_size : {1, 3, 16, 24, 48, context, 1024}) {
    ++turn;
    for (int i = 0; i < kWays; ++i) {
      if (context > kAllPairsUpTo && i != turn % kWays) continue;
      CHECK(same_bits(first, Sequence({dtype, head_size, context, block_size}).run(steps[i])),
            "dtype %d D %d N %d: block size %d, steps of %d", dtype, head_size, context, block_size,
            steps[i]);
    }
  }
}

// A value that sums to -0 keeps its sign however the prefill is cut: who sees nothing of the second
// block of positions adds no 0 to it.
void check_zero_signs(int dtype) {
  auto run = [dtype](int step) {
    Sequence s({dtype, 64, 270, 16});
    std::fill(s.q.begin(), s.q.end(), 1.0f);
    std::fill(s.k.begin(), s.k.end(), 0.0f);
    std::fill(s.v.begin(), s.v.end(), -1e-4f);
    std::fill_n(s.k.begin(), s.width, 10.0f);  // the first key outweighs all others by exp(80)
    std::fill_n(s.v.begin(), s.width, 0.0f);
    return s.run(step);
  };
  const std::vector<float> alone = run(1);
  CHECK(dtype == NS_INT8 || std::signbit(alone[255 * 128]), "no -0 to keep, dtype %d", dtype);
  for (int step : {33, 65, 66, 270})
    CHECK(same_bits(alone, run(step)), "signs of zeros, dtype %d, steps of %d", dtype, step);
}

// A forked sequence attends to a copied block and to what it appended there itself.
void check_copy(int dtype) {
  Sequence s({dtype, 64, 40, 16});
  std::vector<float> whole = s.run(40), out(s.q.size());
  int spare = s.table[3];
  s.cache.copy_block(s.table[2], spare);
  s.cache.poison(s.table[2]);
  s.table[2] = spare;
  s.attend(39, 1, out);
  CHECK(std::equal(out.begin() + 39 * s.width, out.end(), whole.begin() + 39 * s.width),
        "a copied block, dtype %d", dtype);
}

// NaN in a key or a value that a query sees reaches its result.
void check_nan(int dtype) {
  for (bool in_key : {true, false}) {
    Sequence s({dtype, 64, 20, 16});
    (in_key ? s.k : s.v)[7 * s.width + 5] = std::nanf("");
    std::vector<float> out = s.run(20);
    CHECK(!std::isnan(out[6 * s.width + 5]), "row 6 does not see it, dtype %d", dtype);
    CHECK(std::isnan(out[7 * s.width + 5]), "row 7 sees it, dtype %d", dtype);
    CHECK(!std::isnan(out[7 * s.width + 64 + 5]), "the other head does not, dtype %d", dtype);
  }
}

}  // namespace

int main() {
  FlushDenormals flush;
  Digest digest;
  for (int dtype : {NS_FLOAT32, NS_BFLOAT16, NS_FLOAT16, NS_INT8}) {
    for (int head_size : {64, 80, 128, 20, 6, 7, 300})
      for (int context : {1, 16, 17, 100, 530})
        check_against_reference({dtype, head_size, context, 16});
    check_against_reference({dtype, 64, 1000, 24});
    for (int context : {1, 15, 64, 130}) check_bits(dtype, 64, context);
    check_bits(dtype, 20, 37);
    // The row after the last of an odd head size is another group's, or nobody's.
    check_bits(dtype, 7, 37);
    check_bits(dtype, 300, 37);  // scores of more than one block
    check_bits(dtype, 64, 600);
    check_zero_signs(dtype);
    check_copy(dtype);
    check_nan(dtype);
    digest.add(Sequence({dtype, 80, 300, 16}).run(300));
  }
  std::printf("attention digest %016llx\n", digest.value());
  return failures();
}
