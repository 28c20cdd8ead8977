// From logits to tokens: the native twin of engine/sampling.py, which is the definition.
//
// Equal draws give equal tokens. The fast way sums weights in whatever order suits the machine, and
// answers only where no rounding of any order, nor a last bit of exp, could change the token: every
// comparison that decides keeps a margin above the worst error of a sum. Where a comparison is closer
// than that (a draw of exactly 0) the row is drawn again by the definition, one addition after the
// other. Log-probabilities are those of the raw row. Logits are never written.
//
// All values are looked at twice, a block at a time: for the best of each block, and for what they
// weigh. Where top_p and min_p cut is guessed before the second look, which on its way copies the
// values around it; if the cut is not among these, it looks again.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <vector>

#include "ns.h"
#include "sampler_math.h"

namespace ns {

constexpr int32_t kMaxTop = NS_MAX_TOP_LOGPROBS;
constexpr double kForcingBias = 100.0;
constexpr double kMaxRepetitionPenalty = 1e200;  // beyond, float64 could overflow
constexpr double kLog2E = 1.4426950408889634;
constexpr double kNegligible = 46;        // halvings after which a weight matters to no nucleus
constexpr double kSmallestSure = 1e-300;  // the weights around a smaller min_p have fewer bits

// Which values are kept: all above `value`, and the first `num_ties` (by id) that equal it.
struct Cut {
  double value;
  int32_t num_ties;
  bool drops_ties;
};

// Values that are drawn from, and what one look at them told.
template <class Value>
struct Scan {
  const Value* values;
  int32_t n;
  Value peak;
  const Value* maxima;  // of each block
};

// Where the weight of a row lies, as estimated from a sample, in steps down from the peak.
class WeightProfile {
 public:
  WeightProfile(double peak, double least)
      : peak_(peak), step_((peak - least) / kSteps), steps_per_unit_(1 / step_) {}

  void add(double value, double weight) { weights_[step_of(value)] += weight; }

  // A value that stands for `count` like it: its weight is an estimate, and errs.
  void add_sampled(double value, double weight, double count) {
    const int32_t step = step_of(value);
    weights_[step] += count * weight;
    squares_[step] += count * weight * count * weight;
  }

  // Values between which a share of all weight ends, counted from the peak, with three standard
  // deviations to either side. The part above adds (1 - share) of its error, the part below `share`
  // of its own.
  Range<double> around(double share) const {
    const double total = sum(weights_, 0, kSteps), wanted = share * total;
    const int32_t middle = step_reaching(wanted);  // counts for both sides
    const double deviation =
        std::sqrt((1 - share) * (1 - share) * sum(squares_, 0, middle + 1) +
                  share * share * sum(squares_, middle, kSteps));
    const int32_t first = step_reaching(wanted - 3 * deviation);
    const int32_t last = step_reaching(wanted + 3 * deviation);
    return {last == kSteps - 1 ? -kInfinity : peak_ - (last + 1) * step_,
            first == 0 ? kInfinity : peak_ - first * step_};
  }

 private:
  static constexpr int32_t kSteps = 128;

  int32_t step_of(double value) const {
    return value < peak_ ? int32_t(std::min((peak_ - value) * steps_per_unit_, kSteps - 1.0)) : 0;
  }

  int32_t step_reaching(double wanted) const {
    double running = weights_[0];
    int32_t step = 0;
    while (step + 1 < kSteps && running < wanted) running += weights_[++step];
    return step;
  }

  static double sum(const double* values, int32_t begin, int32_t end) {
    return std::accumulate(values + begin, values + end, 0.0);
  }

  double peak_, step_, steps_per_unit_;
  double weights_[kSteps] = {}, squares_[kSteps] = {};
};

struct Ranked {
  double value, weight;
  int32_t place;
};

// Best first, ties by lower place.
inline bool ranks_before(const Ranked& a, const Ranked& b) {
  return a.value != b.value ? a.value > b.value : a.place < b.place;
}

// Samples rows of one vocabulary. Holds scratch memory, so each thread has its own.
class Sampler {
 public:
  explicit Sampler(int32_t vocab_size)
      : vocab_size_(vocab_size),
        raw_maxima_(num_blocks(vocab_size)), known_maxima_(num_blocks(vocab_size)),
        values_(vocab_size), maxima_(num_blocks(vocab_size)), is_stale_(num_blocks(vocab_size)),
        near_values_(vocab_size), weights_(vocab_size), side_values_(vocab_size + kWide),
        side_weights_(vocab_size + kWide),
        block_weights_(num_blocks(vocab_size)), near_starts_(num_blocks(vocab_size) + 1),
        places_(vocab_size + 8), ids_(vocab_size), counts_(vocab_size, 0) {}

  int32_t vocab_size() const { return vocab_size_; }

  int64_t nbytes() const {
    return 8 * int64_t(values_.size() + maxima_.size() + near_values_.size() + weights_.size() +
                       side_values_.size() + side_weights_.size() + block_weights_.size()) +
           4 * int64_t(raw_maxima_.size() + known_maxima_.size() + near_starts_.size() +
                       places_.size() + ids_.size() + counts_.size()) +
           int64_t(is_stale_.size());
  }

  // Row `index` of `result` from logits [V]; ids from `num_token_ids` on are never drawn.
  void sample(const float* logits, int32_t num_token_ids, const NsRow& row, int32_t index,
              const NsResult& result) {
    const KeepDenormals keep_denormals;
    const Peak best = find_peak(logits, vocab_size_, raw_maxima_.data());
    Peak known = best;
    const float* maxima = raw_maxima_.data();
    if (num_token_ids < vocab_size_) {
      known = find_peak(logits, num_token_ids, known_maxima_.data());
      maxima = known_maxima_.data();
    }
    const bool finite = !best.has_nan && known.value > -kInfinity && best.value < kInfinity;
    result.finite[index] = finite;
    result.token_ids[index] = 0;
    result.logprobs[index] = std::numeric_limits<double>::quiet_NaN();
    if (!finite) return;
    int32_t token = row.target;
    if (token < 0)
      token = choose_token({logits, num_token_ids, known.value, maxima}, known.id, row);
    result.token_ids[index] = token;
    if (row.num_logprobs >= 0)
      raw_logprobs({logits, vocab_size_, best.value, raw_maxima_.data()}, token, row.num_logprobs,
                   index, result);
  }

 private:
  static bool adjusts(const NsRow& row) {
    return row.num_biases > 0 || row.num_masked > 0 || row.repetition_penalty != 1 ||
           row.presence_penalty != 0 || row.frequency_penalty != 0;
  }

  int32_t choose_token(const Scan<float>& raw, int32_t best, const NsRow& row) {
    if (!adjusts(row)) return row.temperature == 0 ? best : choose(raw, row);
    adjust(raw.values, raw.n, row);
    const int32_t best_now = find_adjusted_best(raw, row);
    if (row.temperature == 0) return best_now;
    return choose(Scan<double>{values_.data(), raw.n, values_[best_now], maxima_.data()}, row);
  }

  // --- Bias, penalties, masks: into values_[0:n], in float64 ------------------------------------

  void adjust(const float* logits, int32_t n, const NsRow& row) {
    widen(logits, n, values_.data());
    for (int32_t i = 0; i < row.num_biases; ++i)
      if (row.bias_ids[i] < n) values_[row.bias_ids[i]] += row.biases[i];
    penalise(n, row);
    forbid(n, row.masked, row.num_masked);
    bans_.clear();
    forced_.clear();
    for (int32_t i = 0; i < row.num_biases; ++i) {
      if (row.biases[i] <= -kForcingBias) bans_.push_back(row.bias_ids[i]);
      if (row.biases[i] >= kForcingBias) forced_.push_back(row.bias_ids[i]);
    }
    forbid(n, bans_.data(), int32_t(bans_.size()));
    force(n);
  }

  void penalise(int32_t n, const NsRow& row) {
    if (row.repetition_penalty != 1) {
      const double penalty = std::min(row.repetition_penalty, kMaxRepetitionPenalty);
      repeat_penalty(n, row.prompt, row.num_prompt, penalty);
      repeat_penalty(n, row.output, row.num_output, penalty);
      for (int32_t i = 0; i < row.num_prompt; ++i) counts_[row.prompt[i]] = 0;
      for (int32_t i = 0; i < row.num_output; ++i) counts_[row.output[i]] = 0;
    }
    if (row.frequency_penalty == 0 && row.presence_penalty == 0) return;
    for (int32_t i = 0; i < row.num_output; ++i) ++counts_[row.output[i]];
    for (int32_t i = 0; i < row.num_output; ++i) {
      const int32_t id = row.output[i], count = counts_[id];
      counts_[id] = 0;
      if (id >= n || count == 0) continue;
      values_[id] -= row.frequency_penalty * count;
      values_[id] -= row.presence_penalty;
    }
  }

  // Once per id, however often it came; counts_ remembers.
  void repeat_penalty(int32_t n, const int32_t* ids, int32_t num_ids, double penalty) {
    for (int32_t i = 0; i < num_ids; ++i) {
      const int32_t id = ids[i];
      if (counts_[id]++ > 0 || id >= n) continue;
      double& value = values_[id];
      const double lowered[] = {value * penalty, value / penalty};  // no branch: it is any of them
      value = lowered[value > 0];
    }
  }

  // Mask `ids`, unless nothing would be left to draw.
  void forbid(int32_t n, const int32_t* ids, int32_t num_ids) {
    saved_.clear();
    for (int32_t i = 0; i < num_ids; ++i) saved_.push_back(ids[i] < n ? values_[ids[i]] : 0);
    for (int32_t i = 0; i < num_ids; ++i)
      if (ids[i] < n) values_[ids[i]] = -kInfinity;
    const auto end = values_.begin() + n;
    if (std::any_of(values_.begin(), end, [](double v) { return v > -kInfinity; })) return;
    for (int32_t i = num_ids; i-- > 0;)  // backwards: of an id named twice the first copy counts
      if (ids[i] < n) values_[ids[i]] = saved_[i];
  }

  // Mask all but forced_, unless nothing would be left to draw.
  void force(int32_t n) {
    saved_.clear();
    double best = -kInfinity;
    for (int32_t id : forced_) {
      saved_.push_back(id < n ? values_[id] : -kInfinity);
      best = std::max(best, saved_.back());
    }
    if (best == -kInfinity) return;
    std::fill_n(values_.begin(), n, double(-kInfinity));
    for (size_t i = 0; i < forced_.size(); ++i)
      if (forced_[i] < n) values_[forced_[i]] = saved_[i];
  }

  // The place of the best value; in maxima_ the best of each block. Most blocks keep what they had:
  // one is searched again only where its best was touched.
  int32_t find_adjusted_best(const Scan<float>& raw, const NsRow& row) {
    if (!forced_.empty()) return find_best(values_.data(), raw.n, maxima_.data());
    const int32_t count = num_blocks(raw.n);
    std::copy_n(raw.maxima, count, maxima_.begin());
    std::fill_n(is_stale_.begin(), count, uint8_t{0});
    note_touched(raw, row.prompt, row.num_prompt);
    note_touched(raw, row.output, row.num_output);
    note_touched(raw, row.bias_ids, row.num_biases);
    note_touched(raw, row.masked, row.num_masked);
    for (int32_t b = 0; b < count; ++b)
      if (is_stale_[b])
        maxima_[b] = max_of(&values_[b * kBlock], std::min(kBlock, raw.n - b * kBlock));
    return place_of_best(values_.data(), raw.n, maxima_.data());
  }

  void note_touched(const Scan<float>& raw, const int32_t* ids, int32_t num_ids) {
    for (int32_t i = 0; i < num_ids; ++i) {
      if (ids[i] >= raw.n) continue;
      const int32_t b = ids[i] / kBlock;
      is_stale_[b] |= raw.values[ids[i]] == raw.maxima[b];
      maxima_[b] = std::max(maxima_[b], values_[ids[i]]);
    }
  }

  // --- The kept set and the draw ----------------------------------------------------------------

  template <class Value>
  int32_t choose(const Scan<Value>& scan, const NsRow& row) {
    if (row.top_k <= 0 || row.top_k >= scan.n) return draw_from(scan, row);
    const int32_t count = row.top_k;
    find_best_places(scan, count);
    std::copy_n(places_.begin(), count, ids_.begin());
    top_values_.resize(count);
    for (int32_t i = 0; i < count; ++i) top_values_[i] = scan.values[ids_[i]];
    const int32_t best = find_best(top_values_.data(), count, maxima_.data());
    return ids_[draw_from(
        Scan<double>{top_values_.data(), count, top_values_[best], maxima_.data()}, row)];
  }

  // The place that is drawn.
  template <class Value>
  int32_t draw_from(const Scan<Value>& scan, const NsRow& row) {
    const Scale scale{scan.peak, kLog2E / row.temperature};
    if (scale.factor > 0 && scale.factor < kInfinity)
      if (const std::optional<int32_t> place = draw_fast(scan, scale, row)) return *place;
    return draw_as_defined(scan, row);
  }

  // The place that is drawn, or nothing where rounding could decide.
  template <class Value>
  std::optional<int32_t> draw_fast(const Scan<Value>& scan, const Scale& scale, const NsRow& row) {
    const std::optional<Cut> cut = find_cut(scan, scale, row);
    if (!cut) return std::nullopt;
    if (cut->drops_ties) drop_ties(*cut, scan.n);
    return locate(scan, scale, *cut, weigh_kept(*cut, scan.n), row.draw);
  }

  // What all values weigh together; of that, those above a range and those within.
  struct Weighed {
    double all, above, near;
  };

  // Values in `near`, in the order of their places, come to near_values_ and weights_, each block's
  // from near_starts_ on. block_weights_ are those of the values above.
  template <class Value>
  Weighed weigh(const Scan<Value>& scan, const Scale& scale, const Range<Value>& near) {
    Weighed sums{0, 0, 0};
    double weights[kBlock];
    int32_t count = 0;
    for (int32_t b = 0, first = 0; first < scan.n; ++b, first += kBlock) {
      const Value* block = scan.values + first;
      const int32_t size = std::min(kBlock, scan.n - first);
      const double weight = weigh_block(block, size, scale, weights);
      sums.all += weight;
      block_weights_[b] = near.high == -kInfinity ? weight  // all are above: the usual case
                                                  : weight_above(scan, b, weights, near.high);
      sums.above += block_weights_[b];
      near_starts_[b] = count;
      if (near.is_empty() || scan.maxima[b] < near.low) continue;
      const int32_t found = copy_places(block, size, near, 0, places_.data());
      copy_near(block, weights, found, count);
      count += found;
    }
    near_starts_[num_blocks(scan.n)] = count;
    sums.near = weight_from(near_values_.data(), weights_.data(), count, -kInfinity);
    return sums;
  }

  template <class Value>
  static double weight_above(const Scan<Value>& scan, int32_t b, const double* weights,
                             Value limit) {
    if (scan.maxima[b] < limit) return 0;
    const int32_t first = b * kBlock;
    return weight_from(scan.values + first, weights, std::min(kBlock, scan.n - first), limit);
  }

  // The values and weights at the first `count` of places_, to near_values_ and weights_.
  template <class Value>
  void copy_near(const Value* values, const double* weights, int32_t count, int32_t first) {
    for (int32_t i = 0; i < count; ++i) {
      near_values_[first + i] = values[places_[i]];
      weights_[first + i] = weights[places_[i]];
    }
  }

  // Where the kept values end; nothing where rounding could decide. What `weigh` leaves behind has
  // the cut in its sight.
  template <class Value>
  std::optional<Cut> find_cut(const Scan<Value>& scan, const Scale& scale, const NsRow& row) {
    const Range<Value> likely = likely_from(scan.peak, row);
    Range<Value> near = row.top_p < 1 ? guess_nucleus(scan, scale, row.top_p) : likely;
    for (int32_t attempt = 0; attempt < 2; ++attempt) {
      near = {std::max(near.low, likely.low), std::max(near.high, likely.high)};
      const Weighed sums = weigh(scan, scale, near);
      if (is_in_doubt(scan, likely)) return std::nullopt;
      const Cut likely_cut{likely.low, scan.n, false};
      if (row.top_p >= 1) return likely_cut;
      const double wanted = row.top_p * sums.all, margin = sum_error(scan.n) * sums.all;
      if (sums.above >= wanted + margin) {
        near = {near.high, Value(kInfinity)};  // the guess was too low
      } else if (sums.above + sums.near > wanted - margin) {
        const bool any_above = near.high <= scan.peak;
        return select({near_values_.data(), weights_.data(), near_count(scan.n), sums.above,
                       any_above},
                      wanted, margin);
      } else if (near.low <= likely.low) {
        return likely_cut;  // the nucleus has all of them, and more
      } else {
        near = {Value(-kInfinity), near.low};  // too high
      }
    }
    return std::nullopt;
  }

  int32_t near_count(int32_t n) const { return near_starts_[num_blocks(n)]; }

  // What min_p keeps are the values from `low` on, unless there are some below `high`: for those
  // rounding decides, but for the peak, whose weight is exactly 1.
  template <class Value>
  static Range<Value> likely_from(Value peak, const NsRow& row) {
    if (row.min_p <= 0) return {Value(-kInfinity), Value(-kInfinity)};
    const double gap = row.temperature * std::log(row.min_p);
    const double error = 1e-14 * (row.temperature - gap + std::abs(double(peak)));
    if (row.min_p < kSmallestSure || !(error < kInfinity))
      return {Value(-kInfinity), Value(kInfinity)};
    return {round_up<Value>(peak + gap - error), round_up<Value>(peak + gap + error)};
  }

  template <class Value>
  bool is_in_doubt(const Scan<Value>& scan, const Range<Value>& likely) const {
    if (likely.is_empty()) return false;
    const auto doubtful = [&](double value) { return value < likely.high && value != scan.peak; };
    return std::any_of(near_values_.begin(), near_values_.begin() + near_count(scan.n), doubtful);
  }

  // Of the values that equal the cut's, those after the first few weigh nothing.
  void drop_ties(const Cut& cut, int32_t n) {
    int32_t num_ties = 0;
    for (int32_t i = 0; i < near_count(n); ++i)
      if (near_values_[i] == cut.value && ++num_ties > cut.num_ties) weights_[i] = 0;
  }

  // block_weights_: of the kept values only; their sum.
  double weigh_kept(const Cut& cut, int32_t n) {
    double total = 0;
    for (int32_t b = 0; b < num_blocks(n); ++b) {
      const int32_t first = near_starts_[b], count = near_starts_[b + 1] - first;
      if (count > 0)
        block_weights_[b] +=
            weight_from(&near_values_[first], &weights_[first], count, cut.value);
      total += block_weights_[b];
    }
    return total;
  }

  // The first place whose running weight exceeds draw * total, if its neighbours are far enough.
  template <class Value>
  std::optional<int32_t> locate(const Scan<Value>& scan, const Scale& scale, const Cut& cut,
                                double total, double draw) const {
    const double target = draw * total, margin = sum_error(scan.n) * total;
    double running = 0;
    int32_t b = 0;
    while (b + 1 < num_blocks(scan.n) && running + block_weights_[b] <= target)
      running += block_weights_[b++];
    const int32_t first = b * kBlock, size = std::min(kBlock, scan.n - first);
    const Value* block = scan.values + first;
    double weights[kBlock];
    weigh_block(block, size, scale, weights);
    int32_t num_ties = int32_t(
        std::count(near_values_.begin(), near_values_.begin() + near_starts_[b], cut.value));
    for (int32_t i = 0; i < size; ++i) {
      if (block[i] < cut.value || (block[i] == cut.value && ++num_ties > cut.num_ties)) continue;
      const double before = running;
      running += weights[i];
      if (running <= target) continue;
      if (before > target - margin || running < target + margin) return std::nullopt;
      return first + i;
    }
    return std::nullopt;
  }

  // --- Where the best end -----------------------------------------------------------------------

  // Who may be the last one, in the order of their places. All that rank before them weigh `above`.
  struct Candidates {
    const double* values;
    const double* weights;
    int32_t count;
    double above;
    bool any_above;
  };

  // The first of the ranking with which the running weight reaches `wanted`; nothing where it comes
  // closer than the margin. Quickselect, without sorting what is surely in or out.
  std::optional<Cut> select(Candidates found, double wanted, double margin) {
    while (found.count > kSortedDirectly) {
      double pivot = middle_value(found.values, found.count);
      if (count_from(found.values, found.count, pivot) == found.count) {
        pivot = next_up(pivot);  // it is the least of them: split above it
        if (count_from(found.values, found.count, pivot) == 0)
          return cut_ties(found, wanted, margin);
      }
      const double above =
          found.above + weight_from(found.values, found.weights, found.count, pivot);
      if (above >= wanted + margin) {
        found = keep(found, pivot, true);
      } else if (above <= wanted - margin) {
        found = keep(found, pivot, false);
        found.above = above;
        found.any_above = true;
      } else {
        return std::nullopt;
      }
    }
    return cut_sorted(found, wanted, margin);
  }

  // Those from the pivot on, or those below it, in side_values_ and side_weights_.
  Candidates keep(const Candidates& found, double pivot, bool upper) {
    Candidates kept = found;
    kept.values = side_values_.data();
    kept.weights = side_weights_.data();
    kept.count = keep_side(found.values, found.weights, found.count, pivot, upper,
                           side_values_.data(), side_weights_.data());
    return kept;
  }

  // Of candidates with one value, and so with one weight: how many are needed.
  std::optional<Cut> cut_ties(const Candidates& found, double wanted, double margin) const {
    const double value = found.values[0], weight = found.weights[0];
    const double needed = std::max(1.0, std::ceil((wanted - found.above) / weight));
    if (needed > found.count) return std::nullopt;
    const double before = found.above + (needed - 1) * weight;
    const bool is_first = needed == 1 && !found.any_above;  // at least one id is kept
    if (before + weight < wanted + margin) return std::nullopt;
    if (!is_first && before > wanted - margin) return std::nullopt;
    return Cut{value, int32_t(needed), needed < found.count};
  }

  std::optional<Cut> cut_sorted(const Candidates& found, double wanted, double margin) {
    const int32_t count = found.count;
    ranked_.clear();
    for (int32_t i = 0; i < count; ++i) ranked_.push_back({found.values[i], found.weights[i], i});
    std::sort(ranked_.begin(), ranked_.end(), ranks_before);
    double running = found.above;
    int32_t num_ties = 0;
    for (int32_t i = 0; i < count; ++i) {
      const double value = ranked_[i].value, before = running;
      num_ties = i > 0 && ranked_[i - 1].value == value ? num_ties + 1 : 1;
      running += ranked_[i].weight;
      if (running < wanted - margin) continue;
      if (running < wanted + margin) return std::nullopt;
      const bool is_first = i == 0 && !found.any_above;  // at least one id is kept
      if (!is_first && before > wanted - margin) return std::nullopt;
      const bool drops_ties = i + 1 < count && ranked_[i + 1].value == value;
      return Cut{value, num_ties, drops_ties};
    }
    return std::nullopt;
  }

  // The values among which the nucleus probably ends, by an estimate of what weighs how much: the
  // best of each block counts as it is, and every s-th of the other values for s.
  template <class Value>
  Range<Value> guess_nucleus(const Scan<Value>& scan, const Scale& scale, double top_p) {
    if (scan.n < 4 * kSampled) return {Value(-kInfinity), Value(kInfinity)};
    const int32_t num_best = num_blocks(scan.n), stride = scan.n / kSampled;
    const int32_t size = take_sample(scan, stride);
    sampled_weights_.resize(num_blocks(size) * kBlock);
    for (int32_t i = 0; i < size; i += kBlock)
      weigh_block(&sampled_[i], std::min(kBlock, size - i), scale, &sampled_weights_[i]);
    WeightProfile profile(scan.peak, least_sampled(scan.peak, scale, size));
    for (int32_t i = 0; i < num_best; ++i) profile.add(sampled_[i], sampled_weights_[i]);
    for (int32_t i = num_best; i < size; ++i)
      profile.add_sampled(sampled_[i], sampled_weights_[i], stride);
    const Range<double> near = profile.around(top_p);
    return {Value(near.low), Value(near.high)};
  }

  // sampled_: the best of each block, then every s-th of the other values; how many.
  template <class Value>
  int32_t take_sample(const Scan<Value>& scan, int32_t stride) {
    int32_t size = num_blocks(scan.n);
    sampled_.resize(size + scan.n / stride + 1);
    std::copy_n(scan.maxima, size, sampled_.begin());
    for (int32_t i = stride / 2; i < scan.n; i += stride) {
      sampled_[size] = scan.values[i];
      size += scan.values[i] < scan.maxima[i / kBlock];
    }
    return size;
  }

  // The least of the sample that weighs anything to speak of.
  double least_sampled(double peak, const Scale& scale, int32_t size) const {
    const double floor = peak - kNegligible / scale.factor;
    double least = peak;
    for (int32_t i = 0; i < size; ++i)
      if (sampled_[i] > floor) least = std::min(least, sampled_[i]);
    return least;
  }

  // places_: those of the `count` best values, ascending; 0 < count <= n.
  template <class Value>
  void find_best_places(const Scan<Value>& scan, int32_t count) {
    const int32_t found = find_good_places(scan, count);
    if (found == count) return;
    for (int32_t i = 0; i < found; ++i) side_values_[i] = scan.values[places_[i]];
    std::fill_n(side_weights_.begin(), found, 1.0);  // sums of ones are exact: no margin
    const Cut cut = *select({side_values_.data(), side_weights_.data(), found, 0, false}, count, 0);
    int32_t num_kept = 0, num_ties = 0;
    for (int32_t i = 0; i < found; ++i) {
      const double value = scan.values[places_[i]];
      if (value < cut.value || (value == cut.value && ++num_ties > cut.num_ties)) continue;
      places_[num_kept++] = places_[i];
    }
  }

  // places_: all that hold one of the `count` best values, and maybe a few more; how many.
  template <class Value>
  int32_t find_good_places(const Scan<Value>& scan, int32_t count) {
    int32_t found = 0;
    for (int32_t widened = 1; found < count; widened *= 4) {
      const Range<Value> good{guess_least(scan, count, widened), Value(kInfinity)};
      found = 0;
      for (int32_t b = 0, first = 0; first < scan.n; ++b, first += kBlock)
        if (scan.maxima[b] >= good.low)
          found += copy_places(scan.values + first, std::min(kBlock, scan.n - first), good, first,
                               &places_[found]);
    }
    return found;
  }

  // A value that `count` values or a few more reach: certainly so if the best of as many blocks do.
  // Beyond, it is judged by every s-th value.
  template <class Value>
  Value guess_least(const Scan<Value>& scan, int32_t count, int32_t widened) {
    if (count >= scan.n) return -std::numeric_limits<Value>::infinity();
    if (count <= num_blocks(scan.n) / 2) {
      sampled_.assign(scan.maxima, scan.maxima + num_blocks(scan.n));
      return Value(sampled_at_rank(count - 1));
    }
    const int32_t stride = std::max(1, scan.n / kSampled);
    sampled_.clear();
    for (int32_t i = 0; i < scan.n; i += stride) sampled_.push_back(scan.values[i]);
    const double expected = double(count) / stride;
    const double rank = widened * (expected + 4 * std::sqrt(expected) + 4);
    if (rank >= double(sampled_.size())) return -std::numeric_limits<Value>::infinity();
    return Value(sampled_at_rank(int32_t(rank)));
  }

  double sampled_at_rank(int32_t rank) {
    std::nth_element(sampled_.begin(), sampled_.begin() + rank, sampled_.end(),
                     std::greater<double>());
    return sampled_[rank];
  }

  // --- By the definition, one sum after the other -----------------------------------------------

  template <class Value>
  int32_t draw_as_defined(const Scan<Value>& scan, const NsRow& row) {
    const int32_t n = scan.n;
    const double peak = scan.peak;
    double total = 0;
    for (int32_t i = 0; i < n; ++i) {
      weights_[i] = std::exp((scan.values[i] - peak) / row.temperature);
      total += weights_[i];
      places_[i] = i;
    }
    int32_t count = n;
    if (row.top_p < 1) count = nucleus_as_defined(scan.values, n, row.top_p * total);
    if (row.min_p > 0) {
      const auto unlikely = [&](int32_t place) { return weights_[place] < row.min_p; };
      count = int32_t(std::remove_if(places_.begin(), places_.begin() + count, unlikely) -
                      places_.begin());
    }
    total = 0;
    for (int32_t i = 0; i < count; ++i) total += weights_[places_[i]];
    const double target = row.draw * total;
    double running = 0;
    for (int32_t i = 0; i < count; ++i) {
      running += weights_[places_[i]];
      if (running > target) return places_[i];
    }
    return places_[count - 1];  // not reached: draw * total rounds below the total
  }

  template <class Value>
  int32_t nucleus_as_defined(const Value* values, int32_t n, double wanted) {
    ranked_.clear();
    for (int32_t i = 0; i < n; ++i) ranked_.push_back({double(values[i]), weights_[i], i});
    std::sort(ranked_.begin(), ranked_.end(), ranks_before);
    double running = 0;
    int32_t count = 0;
    do running += ranked_[count].weight;
    while (running < wanted && ++count < n);
    count = std::min(count + 1, n);
    for (int32_t i = 0; i < count; ++i) places_[i] = ranked_[i].place;
    std::sort(places_.begin(), places_.begin() + count);
    return count;
  }

  // --- Log-probabilities of the raw row ---------------------------------------------------------

  void raw_logprobs(const Scan<float>& raw, int32_t token, int32_t num_top, int32_t index,
                    const NsResult& result) {
    const double log_total = std::log(sum_exp(raw.values, raw.n, raw.peak));
    const auto logprob = [&](int32_t id) {
      return (double(raw.values[id]) - double(raw.peak)) - log_total;
    };
    result.logprobs[index] = logprob(token);
    const int32_t count = std::min({num_top, vocab_size_, kMaxTop});
    rank_best(raw, count);
    for (int32_t i = 0; i < count; ++i) {
      const int32_t id = ranked_[i].place;
      result.top_ids[int64_t(index) * kMaxTop + i] = id;
      result.top_logprobs[int64_t(index) * kMaxTop + i] = logprob(id);
    }
  }

  // ranked_: the `count` best ids of the raw row, best first.
  void rank_best(const Scan<float>& raw, int32_t count) {
    if (count > 0) find_best_places(raw, count);
    ranked_.clear();
    for (int32_t i = 0; i < count; ++i)
      ranked_.push_back({raw.values[places_[i]], 0.0, places_[i]});
    std::sort(ranked_.begin(), ranked_.end(), ranks_before);
  }

  static constexpr int32_t kSortedDirectly = 32;
  static constexpr int32_t kSampled = 1024;

  int32_t vocab_size_;
  std::vector<float> raw_maxima_, known_maxima_;    // of blocks: all, and of ids that can be drawn
  std::vector<double> values_, maxima_;             // adjusted logits, and the best of each block
  std::vector<uint8_t> is_stale_;                   // blocks whose best is to be found again
  std::vector<double> near_values_, weights_;       // around the cut; by the definition all weights
  std::vector<double> side_values_, side_weights_;  // candidates, while one of them is selected
  std::vector<double> block_weights_, top_values_, saved_, sampled_, sampled_weights_;
  std::vector<int32_t> near_starts_;                // where each block begins in near_values_
  std::vector<int32_t> places_, ids_, counts_, bans_, forced_;  // counts_ is zero between rows
  std::vector<Ranked> ranked_;
};

}  // namespace ns
