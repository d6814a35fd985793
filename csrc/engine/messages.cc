#include "engine/messages.h"

#include <algorithm>

namespace bagua {
namespace {

// Ids as a bit-vector over the words that are not all zero at either end.
void put_ids(Writer& w, const std::vector<int32_t>& ids) {
  std::vector<uint64_t> words;
  int32_t first = 0;
  if (!ids.empty()) {
    const auto [low, high] = std::minmax_element(ids.begin(), ids.end());
    first = *low / 64;
    words.resize(static_cast<size_t>(*high / 64 - first) + 1);
    for (const int32_t id : ids)
      words[static_cast<size_t>(id / 64 - first)] |= uint64_t{1} << (id % 64);
  }
  w.put(first);
  w.put_vector(words);
}

std::vector<int32_t> get_ids(Reader& r) {
  const auto first = r.get<int32_t>();
  std::vector<int32_t> ids;
  int32_t base = first * 64;
  for (uint64_t word : r.get_vector<uint64_t>()) {
    for (; word != 0; word &= word - 1) ids.push_back(base + __builtin_ctzll(word));
    base += 64;
  }
  return ids;
}

void put_key(Writer& w, const Key& key) {
  w.put_string(key.name);
  w.put(key.seq);
}

Key get_key(Reader& r) {
  Key key;
  key.name = r.get_string();
  key.seq = r.get<uint64_t>();
  return key;
}

template <class T, class Put>
void put_each(Writer& w, const std::vector<T>& items, Put&& put) {
  w.put(static_cast<uint32_t>(items.size()));
  for (const T& item : items) put(item);
}

template <class Get>
void get_each(Reader& r, Get&& get) {
  for (auto n = r.get<uint32_t>(); n > 0; --n) get();
}

}  // namespace

void Report::clear() {
  ids.clear();
  unnamed.clear();
  full.clear();
  join = last = false;
}

void Report::encode(Writer& w) const {
  w.put(MessageType::kReport);
  w.put(set);
  w.put(join);
  w.put(last);
  put_ids(w, ids);
  w.put_vector(unnamed);
  put_each(w, full, [&](const Full& f) {
    put_key(w, f.key);
    w.put_string(f.description);
    w.put_string(f.refusal);
    w.put(f.for_good);
  });
}

Report Report::decode(Reader& r) {
  Report report;
  report.set = r.get<int32_t>();
  report.join = r.get<bool>();
  report.last = r.get<bool>();
  report.ids = get_ids(r);
  report.unnamed = r.get_vector<Again>();
  get_each(r, [&] {
    Full f;
    f.key = get_key(r);
    f.description = r.get_string();
    f.refusal = r.get_string();
    f.for_good = r.get<bool>();
    report.full.push_back(std::move(f));
  });
  return report;
}

bool Decision::ends_joins() const {
  return last_joined >= 0 || std::any_of(rejections.begin(), rejections.end(),
                                         [](const auto& r) { return r.key.is_join(); });
}

void Decision::encode(Writer& w) const {
  w.put(MessageType::kDecision);
  w.put(set);
  w.put(last_joined);
  put_each(w, definitions, [&](const Definition& d) {
    w.put(d.id);
    w.put_string(d.name);
    w.put_string(d.description);
  });
  std::vector<int32_t> named;
  std::vector<Agreed> others;
  for (const Agreed& a : agreed) {
    if (a.as_bit()) {
      named.push_back(a.id);
    } else {
      others.push_back(a);
    }
  }
  put_ids(w, named);
  w.put_vector(others);
  put_each(w, rejections, [&](const Rejection& x) {
    put_key(w, x.key);
    w.put(x.kind);
    w.put_string(x.text);
    w.put_vector(x.ranks);
  });
}

Decision Decision::decode(Reader& r) {
  Decision decision;
  decision.set = r.get<int32_t>();
  decision.last_joined = r.get<int32_t>();
  get_each(r, [&] {
    Definition d;
    d.id = r.get<int32_t>();
    d.name = r.get_string();
    d.description = r.get_string();
    decision.definitions.push_back(std::move(d));
  });
  for (const int32_t id : get_ids(r)) decision.agreed.push_back({id, 0});
  for (const Agreed& a : r.get_vector<Agreed>()) decision.agreed.push_back(a);
  get_each(r, [&] {
    Rejection x;
    x.key = get_key(r);
    x.kind = r.get<ErrorKind>();
    x.text = r.get_string();
    x.ranks = r.get_vector<int32_t>();
    decision.rejections.push_back(std::move(x));
  });
  return decision;
}

std::string text_message(MessageType type, std::string_view text) {
  Writer w;
  w.put(type);
  w.put_string(text);
  return w.take();
}

}  // namespace bagua
