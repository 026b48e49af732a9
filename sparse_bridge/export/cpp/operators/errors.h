// Errors of operators, by the names that they have in Python.

#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace sparse_bridge {

// What `last_error()` returns next.
std::string &last_message();

template <class... Parts> [[noreturn]] void fail(const char *kind, const Parts &...parts) {
  std::ostringstream text;
  text << kind << ": ";
  (text << ... << parts);
  last_message() = text.str();
  throw std::runtime_error(text.str());
}

template <class Values> std::string listed(const Values &values) {
  std::ostringstream text;
  text << '[';
  for (size_t i = 0; i < values.size(); ++i) text << (i ? ", " : "") << values[i];
  text << ']';
  return text.str();
}

} // namespace sparse_bridge
