// Threads of our own: a job is a number of chunks, and is done when all its chunks are.
//
// Each thread owns a contiguous range of chunks (one sequential stream of weights) and, when it has
// none left, steals from the far end of another's. So a thread that the system has put aside costs
// the one chunk it holds, not its share. Waiting threads spin for a moment and then sleep: between
// steps nothing runs. The caller's thread is thread 0 and works like the others.
//
// A job's chunks are taken by compare-and-swap on a word that carries the job's number, so a thread
// that comes late finds nothing to take, and reads the job only once it holds one of its chunks.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace ns {

class Pool {
 public:
  static constexpr int kMaxChunks = (1 << 20) - 1;  // of a job; longer ones run as several

  // `num_threads` counts the caller. Throws std::system_error if the system refuses a thread.
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return num_threads_; }

  // True in a forked child: the threads stayed with the parent, and their locks may be held for
  // ever. Such a pool can be neither used nor destroyed; let go of it and make another.
  bool belongs_to_another_process() const;

  // Calls work(chunk, thread) once for each chunk in [0, num_chunks), returns when all returned.
  // `work` must not throw, nor run another job. One caller at a time.
  template <class Work>
  void run(int num_chunks, Work&& work) {
    if (num_chunks == 1 || num_threads_ == 1) {
      for (int chunk = 0; chunk < num_chunks; ++chunk) work(chunk, 0);
      return;
    }
    struct Part {
      std::remove_reference_t<Work>* work;
      int first;
    };
    auto call = [](void* context, int chunk, int thread) {
      const Part& part = *static_cast<Part*>(context);
      (*part.work)(part.first + chunk, thread);
    };
    for (Part part{&work, 0}; part.first < num_chunks; part.first += kMaxChunks)
      run_job(std::min(kMaxChunks, num_chunks - part.first), call, &part);
  }

 private:
  using Call = void (*)(void* context, int chunk, int thread);

  struct alignas(64) Range {
    std::atomic<uint64_t> word{0};  // job number : 24, first chunk : 20, end : 20
  };

  void run_job(int num_chunks, Call call, void* context);
  void publish(int num_chunks);
  void serve(int thread);
  void work_on(uint32_t job, int thread);
  bool take(Range& range, uint32_t job, bool from_front, int* chunk);
  void finish(int chunk, int thread);
  void wait_until_finished(int num_chunks);
  bool wait_for_job(uint32_t seen);
  void stop_threads();

  const int num_threads_;
  const int64_t process_;
  std::unique_ptr<Range[]> ranges_;  // one per thread

  // The job: written while no chunk can be taken, read by whoever holds a chunk.
  Call call_ = nullptr;
  void* context_ = nullptr;
  int num_chunks_ = 0;

  alignas(64) std::atomic<uint32_t> job_{0};
  alignas(64) std::atomic<int> num_finished_{0};
  alignas(64) std::atomic<int> num_sleeping_{0};
  std::atomic<bool> caller_sleeps_{false};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable job_came_, job_done_;
  std::vector<std::thread> threads_;
};

}  // namespace ns
