// From logits to tokens: the native twin of engine/sampling.py, which is the definition.
//
// Equal draws give equal tokens. The fast way sums weights in whatever order suits the machine, and
// answers only where no rounding of any order, nor a last bit of exp, could change the token: every
// comparison that decides keeps a margin above the worst error of a sum. Where a comparison is closer
// than that (ties, a draw of exactly 0) the row is drawn again by the definition, one addition after
// the other. Log-probabilities are those of the raw row. Logits are never written.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

#include "ns.h"
#include "sampler_math.h"

namespace ns {

constexpr int32_t kMaxTop = NS_MAX_TOP_LOGPROBS;
constexpr double kForcingBias = 100.0;
constexpr double kMaxRepetitionPenalty = 1e200;  // beyond, float64 could overflow

// Which values are kept: all above `value`, and the first `num_ties` (by id) that equal it.
template <class Value>
struct Cut {
  Value value;
  int32_t num_ties;
  bool drops_ties;
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
        values_(vocab_size), weights_(vocab_size + kWide), side_values_(vocab_size + kWide),
        side_weights_(vocab_size + kWide), block_sums_(vocab_size / kSumBlock + 2),
        places_(vocab_size + 16), ids_(vocab_size), counts_(vocab_size, 0) {}

  int64_t nbytes() const {
    return 8 * int64_t(values_.size() + weights_.size() + side_values_.size() +
                       side_weights_.size() + block_sums_.size()) +
           4 * int64_t(places_.size() + ids_.size() + counts_.size());
  }

  // Row `index` of `result` from logits [V]; ids from `num_token_ids` on are never drawn.
  void sample(const float* logits, int32_t num_token_ids, const NsRow& row, int32_t index,
              const NsResult& result) {
    const KeepDenormals keep_denormals;
    const Peak known = find_peak(logits, 0, num_token_ids);
    const Peak rest = find_peak(logits, num_token_ids, vocab_size_);
    const float peak = std::max(known.value, rest.value);
    const bool finite = !known.has_nan && !rest.has_nan && known.value > -kInfinity &&
                        peak < kInfinity;
    result.finite[index] = finite;
    result.token_ids[index] = 0;
    result.logprobs[index] = std::numeric_limits<double>::quiet_NaN();
    if (!finite) return;
    int32_t token = row.target;
    if (token < 0) token = choose_token(logits, num_token_ids, row, known);
    result.token_ids[index] = token;
    if (row.num_logprobs >= 0) raw_logprobs(logits, peak, token, row.num_logprobs, index, result);
  }

 private:
  static bool adjusts(const NsRow& row) {
    return row.num_biases > 0 || row.num_masked > 0 || row.repetition_penalty != 1 ||
           row.presence_penalty != 0 || row.frequency_penalty != 0;
  }

  int32_t choose_token(const float* logits, int32_t n, const NsRow& row, const Peak& best) {
    if (!adjusts(row)) {
      if (row.temperature == 0) return best.id;
      return choose(logits, n, best.value, row);
    }
    adjust(logits, n, row);
    const int32_t best_now = find_best(values_.data(), n);
    if (row.temperature == 0) return best_now;
    return choose(values_.data(), n, values_[best_now], row);
  }

  // --- Bias, penalties, masks: into values_[0:n], in float64 ------------------------------------

  void adjust(const float* logits, int32_t n, const NsRow& row) {
    for (int32_t i = 0; i < n; ++i) values_[i] = logits[i];
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
      value = value > 0 ? value / penalty : value * penalty;
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

  // --- The kept set and the draw ----------------------------------------------------------------

  template <class Value>
  int32_t choose(const Value* values, int32_t n, Value peak, const NsRow& row) {
    if (row.top_k <= 0 || row.top_k >= n) return draw_from(values, nullptr, n, peak, row);
    const Cut<Value> cut = cut_after(values, n, row.top_k);
    const int32_t count = find_places(values, n, cut);
    std::copy_n(places_.begin(), count, ids_.begin());
    top_values_.resize(count);
    for (int32_t i = 0; i < count; ++i) top_values_[i] = values[ids_[i]];
    return draw_from(top_values_.data(), ids_.data(), count, double(peak), row);
  }

  // `ids` name the values where these are not of 0 .. n - 1.
  template <class Value>
  int32_t draw_from(const Value* values, const int32_t* ids, int32_t n, Value peak,
                    const NsRow& row) {
    std::optional<int32_t> place = draw_fast(values, n, peak, row);
    if (!place) place = draw_as_defined(values, n, peak, row);
    return ids ? ids[*place] : *place;
  }

  // The place that is drawn, or nothing where rounding could decide.
  template <class Value>
  std::optional<int32_t> draw_fast(const Value* values, int32_t n, Value peak, const NsRow& row) {
    double total = weigh(values, n, peak, row.temperature, weights_.data(), block_sums_.data());
    Cut<double> cut{-kInfinity, n, false};
    if (row.top_p < 1) {
      const std::optional<Cut<double>> found = nucleus(values, n, total, row.top_p);
      if (!found) return std::nullopt;
      cut = *found;
    }
    if (row.top_p < 1 || row.min_p > 0) {
      if (cut.drops_ties) drop_ties(values, n, cut);
      const Kept kept = keep_only(values, weights_.data(), n, Value(cut.value), row.min_p,
                                  block_sums_.data());
      if (!kept.is_sure) return std::nullopt;
      total = kept.total;
    }
    return locate(n, total, row.draw);
  }

  // Of the values that equal the cut's, those after the first few weigh nothing.
  template <class Value>
  void drop_ties(const Value* values, int32_t n, const Cut<double>& cut) {
    int32_t num_ties = 0;
    for (int32_t i = 0; i < n; ++i)
      if (values[i] == cut.value && ++num_ties > cut.num_ties) weights_[i] = 0;
  }

  // The first index whose running weight exceeds draw * total, if its neighbours are far enough.
  std::optional<int32_t> locate(int32_t n, double total, double draw) const {
    const double target = draw * total, margin = sum_error(n) * total;
    double running = 0;
    int32_t i = 0;
    for (const double* block = block_sums_.data(); i + kSumBlock <= n; i += kSumBlock, ++block) {
      if (running + *block > target) break;
      running += *block;
    }
    for (; i < n; ++i) {
      const double before = running;
      running += weights_[i];
      if (running <= target) continue;
      if (before > target - margin || running < target + margin) return std::nullopt;
      return i;
    }
    return std::nullopt;
  }

  // Where the nucleus ends: quickselect by weight, without sorting what is surely in or out.
  template <class Value>
  std::optional<Cut<double>> nucleus(const Value* values, int32_t n, double total, double top_p) {
    const double wanted = top_p * total, margin = sum_error(n) * total;
    Candidates found = candidates_near(values, n, total, wanted);
    if (found.count == 0) found = heavy_candidates(values, n, total - wanted, margin);
    double* v = side_values_.data();
    double* w = side_weights_.data();
    while (found.count > kSortedDirectly) {
      double pivot = middle_value(v, found.count);
      HeavySum upper = sum_at_least(v, w, found.count, pivot);
      if (upper.count == found.count) {  // the pivot is the least of them: split above it
        pivot = std::nextafter(pivot, double(kInfinity));
        upper = sum_at_least(v, w, found.count, pivot);
        if (upper.count == 0) return std::nullopt;  // all are ties
      }
      if (found.above + upper.weight >= wanted + margin) {
        found.count = keep_side(v, w, found.count, pivot, true);
      } else if (found.above + upper.weight <= wanted - margin) {
        found = {keep_side(v, w, found.count, pivot, false), found.above + upper.weight, true};
      } else {
        return std::nullopt;
      }
    }
    return cut_sorted(found, wanted, margin);
  }

  // In side_values_ and side_weights_, in the order of their places: who may be the nucleus's last.
  // All that rank before them weigh `above`.
  struct Candidates {
    int32_t count;
    double above;
    bool any_above;
  };

  // All but the lightest, which together weigh less than half of what the nucleus leaves out.
  template <class Value>
  Candidates heavy_candidates(const Value* values, int32_t n, double left_out, double margin) {
    const double least = left_out > 4 * margin ? 0.5 * left_out / n : 0;
    const int32_t count = copy_heavy(values, weights_.data(), n, least, side_values_.data(),
                                     side_weights_.data());
    return {count, 0, false};
  }

  // Those around where a sample of the places puts the cut; none where it tells nothing, because few
  // ids have most of the weight.
  template <class Value>
  Candidates candidates_near(const Value* values, int32_t n, double total, double wanted) {
    constexpr int32_t sample_size = 256, deviations = 32;  // of sqrt(sample_size) / 2, four
    const int32_t stride = n / sample_size;
    if (stride < 8) return {0, 0, false};
    ranked_.clear();
    double sampled_total = 0;
    for (int32_t i = stride / 2; i < n; i += stride) {
      ranked_.push_back({double(values[i]), weights_[i], i});
      sampled_total += weights_[i];
    }
    if (std::abs(sampled_total * stride - total) > 0.1 * total) return {0, 0, false};
    std::sort(ranked_.begin(), ranked_.end(), ranks_before);
    const double share = wanted / total * sampled_total;
    const int32_t size = int32_t(ranked_.size());
    int32_t cut = 0;
    for (double running = 0; cut < size && running < share; ++cut) running += ranked_[cut].weight;
    const double high = cut < deviations ? kInfinity : ranked_[cut - deviations].value;
    const double low = cut + deviations < size ? ranked_[cut + deviations].value : -kInfinity;
    double above;
    const int32_t count = copy_between(values, weights_.data(), n, low, high, side_values_.data(),
                                       side_weights_.data(), &above);
    const HeavySum inside =
        sum_at_least(side_values_.data(), side_weights_.data(), count, -kInfinity);
    const double margin = sum_error(n) * total;
    if (above > wanted - margin || above + inside.weight < wanted + margin) return {0, 0, false};
    return {count, above, high < kInfinity};
  }

  std::optional<Cut<double>> cut_sorted(const Candidates& found, double wanted, double margin) {
    const int32_t count = found.count;
    ranked_.clear();
    for (int32_t i = 0; i < count; ++i) ranked_.push_back({side_values_[i], side_weights_[i], i});
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
      return Cut<double>{value, num_ties, drops_ties};
    }
    return std::nullopt;
  }

  // Where the `count` best of n values end, 0 < count < n.
  template <class Value>
  Cut<Value> cut_after(const Value* values, int32_t n, int32_t count) {
    double* best = side_values_.data();
    int32_t num_best = 0;
    for (int32_t widened = 1; num_best < count; widened *= 4)
      num_best = copy_places(values, n, guess_cut(values, n, count, widened), places_.data());
    for (int32_t i = 0; i < num_best; ++i) best[i] = values[places_[i]];
    std::nth_element(best, best + count - 1, best + num_best, std::greater<double>());
    const double last = best[count - 1];
    int32_t num_above = 0, num_equal = 0;
    for (int32_t i = 0; i < num_best; ++i) {
      num_above += best[i] > last;
      num_equal += best[i] == last;
    }
    return {Value(last), count - num_above, count - num_above < num_equal};
  }

  // A value that `count` values or a few more are likely to reach, judged by every s-th of them.
  template <class Value>
  Value guess_cut(const Value* values, int32_t n, int32_t count, int32_t widened) {
    const int32_t stride = std::max(1, n / 1024);
    sampled_.clear();
    for (int32_t i = 0; i < n; i += stride) sampled_.push_back(values[i]);
    const double expected = double(count) / stride;
    const double rank = widened * (expected + 4 * std::sqrt(expected) + 4);
    if (rank >= double(sampled_.size())) return -std::numeric_limits<Value>::infinity();
    const auto place = sampled_.begin() + int32_t(rank);
    std::nth_element(sampled_.begin(), place, sampled_.end(), std::greater<double>());
    return Value(*place);
  }

  // places_: the kept ones in ascending order; how many.
  template <class Value>
  int32_t find_places(const Value* values, int32_t n, const Cut<Value>& cut) {
    const int32_t count = copy_places(values, n, cut.value, places_.data());
    if (!cut.drops_ties) return count;
    int32_t num_kept = 0, num_ties = 0;
    for (int32_t i = 0; i < count; ++i) {
      const int32_t place = places_[i];
      const bool is_tie = values[place] == cut.value;
      if (is_tie && ++num_ties > cut.num_ties) continue;
      places_[num_kept++] = place;
    }
    return num_kept;
  }

  // --- By the definition, one sum after the other -----------------------------------------------

  template <class Value>
  int32_t draw_as_defined(const Value* values, int32_t n, Value peak, const NsRow& row) {
    double total = 0;
    for (int32_t i = 0; i < n; ++i) {
      weights_[i] = std::exp((double(values[i]) - double(peak)) / row.temperature);
      total += weights_[i];
      places_[i] = i;
    }
    int32_t count = n;
    if (row.top_p < 1) count = nucleus_as_defined(values, n, row.top_p * total);
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

  void raw_logprobs(const float* logits, float peak, int32_t token, int32_t num_top, int32_t index,
                    const NsResult& result) {
    const double log_total = std::log(sum_exp(logits, vocab_size_, peak));
    const auto logprob = [&](int32_t id) {
      return (double(logits[id]) - double(peak)) - log_total;
    };
    result.logprobs[index] = logprob(token);
    const int32_t count = std::min({num_top, vocab_size_, kMaxTop});
    rank_best(logits, count);
    for (int32_t i = 0; i < count; ++i) {
      const int32_t id = ranked_[i].place;
      result.top_ids[int64_t(index) * kMaxTop + i] = id;
      result.top_logprobs[int64_t(index) * kMaxTop + i] = logprob(id);
    }
  }

  // ranked_: the `count` best ids of the raw row, best first.
  void rank_best(const float* logits, int32_t count) {
    ranked_.clear();
    if (count == 0) return;
    Cut<float> cut{-kInfinity, vocab_size_, false};
    if (count < vocab_size_) cut = cut_after(logits, vocab_size_, count);
    const int32_t num_places = find_places(logits, vocab_size_, cut);
    for (int32_t i = 0; i < num_places; ++i)
      ranked_.push_back({logits[places_[i]], 0.0, places_[i]});
    std::sort(ranked_.begin(), ranked_.end(), ranks_before);
  }

  static constexpr int32_t kSortedDirectly = 128;

  int32_t vocab_size_;
  std::vector<double> values_;                     // adjusted logits
  std::vector<double> weights_;                    // exp of them, the best one's being 1
  std::vector<double> side_values_, side_weights_; // candidates; then the kept weights
  std::vector<double> block_sums_, top_values_, saved_, sampled_;
  std::vector<int32_t> places_, ids_, counts_, bans_, forced_;  // counts_ is zero between rows
  std::vector<Ranked> ranked_;
};

}  // namespace ns
