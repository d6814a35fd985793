// What a child of fork() has to change in the objects it has got from its parent.
#pragma once

#include <pthread.h>

#include <mutex>
#include <set>

namespace bagua {

// The objects of a class that exist in this process. In a child, in_child() of each is called
// before fork() returns, also in one that Python does not hear of.
template <typename Object>
class Forked {
 public:
  static Forked& all() {
    static Forked* all = new Forked;  // forks may come until the very end
    return *all;
  }
  void add(Object* object) {
    std::lock_guard<std::mutex> lock(mutex_);
    objects_.insert(object);
  }
  // No child is made after `last` that still has the object.
  template <typename Last>
  void remove(Object* object, Last last) {
    std::lock_guard<std::mutex> lock(mutex_);
    last();
    objects_.erase(object);
  }
  // No child is made meanwhile.
  template <typename Work>
  void meanwhile(Work work) {
    std::lock_guard<std::mutex> lock(mutex_);
    work();
  }
  template <typename Look>
  void each(Look look) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Object* object : objects_) look(*object);
  }

 private:
  Forked() {
    ::pthread_atfork([] { all().mutex_.lock(); }, [] { all().mutex_.unlock(); },
                     [] { all().begin_child(); });
  }
  void begin_child() {
    for (Object* object : objects_) object->in_child();
    mutex_.unlock();
  }

  std::mutex mutex_;
  std::set<Object*> objects_;
};

}  // namespace bagua
