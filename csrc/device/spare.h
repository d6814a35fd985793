// Memory that nobody uses at present, by size, for whoever asks for so much next.
#pragma once

#include <cstddef>
#include <iterator>
#include <map>
#include <memory>
#include <utility>

namespace bagua {

class Spare {
 public:
  struct Piece {
    size_t nbytes = 0;
    std::shared_ptr<char> memory;  // null: there is none
  };

  void put(Piece piece) { pieces_.emplace(piece.nbytes, std::move(piece.memory)); }
  // One of so many bytes or somewhat more: what is much larger stays for those who need it.
  Piece take(size_t nbytes) {
    const auto found = pieces_.lower_bound(nbytes);
    return found != pieces_.end() && found->first <= 2 * nbytes ? take_out(found) : Piece{};
  }
  // The largest that has fewer.
  Piece take_smaller(size_t nbytes) {
    const auto larger = pieces_.lower_bound(nbytes);
    return larger != pieces_.begin() ? take_out(std::prev(larger)) : Piece{};
  }

 private:
  using Pieces = std::multimap<size_t, std::shared_ptr<char>>;
  Piece take_out(Pieces::iterator place) {
    Piece piece{place->first, std::move(place->second)};
    pieces_.erase(place);
    return piece;
  }
  Pieces pieces_;
};

}  // namespace bagua
