#include "pool.h"

#include <chrono>
#include <stdexcept>
#include <string>
#include <system_error>

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include "simd.h"

namespace ns {
namespace {

constexpr uint32_t kJobMask = (1u << 24) - 1;
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kSpinsPerClock = 64;

uint64_t pack(uint32_t job, int first, int end) {
  return static_cast<uint64_t>(job) << 40 | static_cast<uint64_t>(first) << 20 |
         static_cast<uint64_t>(end);
}
uint32_t job_of(uint64_t word) { return static_cast<uint32_t>(word >> 40); }
int first_of(uint64_t word) { return static_cast<int>(word >> 20 & 0xfffff); }
int end_of(uint64_t word) { return static_cast<int>(word & 0xfffff); }

void pause() {
#if defined(__SSE2__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// True once `ready` is; false if it was not for about `kSpin`.
template <class Ready>
bool spin_until(Ready ready) {
  const auto start = std::chrono::steady_clock::now();
  do {
    for (int i = 0; i < kSpinsPerClock; ++i) {
      if (ready()) return true;
      pause();
    }
    std::this_thread::yield();  // who is waited for may stand behind us, if another program runs
  } while (std::chrono::steady_clock::now() - start < kSpin);
  return false;
}

// Signals belong to the threads of the program, not to ours: a thread inherits the mask.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &saved_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }

 private:
  sigset_t saved_;
};

}  // namespace

Pool::Pool(int num_threads)
    : num_threads_(num_threads), process_(getpid()), ranges_(new Range[num_threads]) {
  const SignalsBlocked blocked;
  try {
    for (int thread = 1; thread < num_threads; ++thread)
      threads_.emplace_back([this, thread] { serve(thread); });
  } catch (const std::system_error& error) {
    stop_threads();
    throw std::runtime_error("the system does not start " + std::to_string(num_threads) +
                             " threads (--threads): " + error.code().message());
  }
}

Pool::~Pool() { stop_threads(); }

void Pool::stop_threads() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
  }
  job_came_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

bool Pool::belongs_to_another_process() const { return process_ != getpid(); }

void Pool::run_job(int num_chunks, Call call, void* context) {
  call_ = call;
  context_ = context;
  num_chunks_ = num_chunks;
  num_finished_.store(0, std::memory_order_relaxed);
  publish(num_chunks);
  work_on(job_.load(std::memory_order_relaxed), 0);
  wait_until_finished(num_chunks);
}

void Pool::publish(int num_chunks) {
  const uint32_t job = (job_.load(std::memory_order_relaxed) + 1) & kJobMask;
  for (int thread = 0; thread < num_threads_; ++thread) {
    const int64_t first = static_cast<int64_t>(num_chunks) * thread / num_threads_;
    const int64_t end = static_cast<int64_t>(num_chunks) * (thread + 1) / num_threads_;
    ranges_[thread].word.store(pack(job, static_cast<int>(first), static_cast<int>(end)),
                               std::memory_order_release);
  }
  job_.store(job);
  // Either this load sees a thread that is about to sleep, or that thread sees the new job.
  if (num_sleeping_.load() > 0) {
    { std::lock_guard<std::mutex> lock(mutex_); }
    job_came_.notify_all();
  }
}

bool Pool::take(Range& range, uint32_t job, bool from_front, int* chunk) {
  uint64_t word = range.word.load(std::memory_order_acquire);
  while (job_of(word) == job && first_of(word) < end_of(word)) {
    const int first = first_of(word), end = end_of(word);
    const uint64_t rest = from_front ? pack(job, first + 1, end) : pack(job, first, end - 1);
    if (range.word.compare_exchange_weak(word, rest, std::memory_order_acq_rel)) {
      *chunk = from_front ? first : end - 1;
      return true;
    }
  }
  return false;
}

void Pool::work_on(uint32_t job, int thread) {
  int chunk;
  while (take(ranges_[thread], job, true, &chunk)) finish(chunk, thread);
  for (int step = 1; step < num_threads_; ++step) {
    Range& other = ranges_[(thread + step) % num_threads_];
    while (take(other, job, false, &chunk)) finish(chunk, thread);
  }
}

void Pool::finish(int chunk, int thread) {
  const int num_chunks = num_chunks_;
  call_(context_, chunk, thread);
  // After the last chunk is counted the job is over: none of its fields may be read any more.
  if (num_finished_.fetch_add(1) + 1 == num_chunks && caller_sleeps_.load()) {
    { std::lock_guard<std::mutex> lock(mutex_); }
    job_done_.notify_one();
  }
}

void Pool::wait_until_finished(int num_chunks) {
  auto finished = [&] { return num_finished_.load() == num_chunks; };
  if (spin_until(finished)) return;
  std::unique_lock<std::mutex> lock(mutex_);
  caller_sleeps_.store(true);
  job_done_.wait(lock, finished);
  caller_sleeps_.store(false);
}

void Pool::serve(int thread) {
  const FlushDenormals flush;
  uint32_t seen = 0;
  while (wait_for_job(seen)) {
    seen = job_.load();
    work_on(seen, thread);
  }
}

// False: the pool stops.
bool Pool::wait_for_job(uint32_t seen) {
  auto came = [&] { return job_.load() != seen || stop_.load(); };
  if (!spin_until(came)) {
    std::unique_lock<std::mutex> lock(mutex_);
    num_sleeping_.fetch_add(1);
    job_came_.wait(lock, came);
    num_sleeping_.fetch_sub(1);
  }
  return !stop_.load();
}

}  // namespace ns
