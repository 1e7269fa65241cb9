// Arguments of the harness programs.
#pragma once
#include <sstream>
#include <string>
#include <vector>

inline std::vector<std::string> split(const std::string& s, char by) {
    std::vector<std::string> out;
    std::stringstream in(s);
    for (std::string x; std::getline(in, x, by);) out.push_back(x);
    return out;
}
