// Runs packages on the scenes that were recorded with them, and compares.
//
//   run_package [--repeat N] FOLDER ...
//
// Exits with 0 where all results agree, 1 where one differs, 2 where the package cannot run.

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <ATen/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "sparse_bridge_ops.h"

namespace {

using Tensors = std::vector<at::Tensor>;

// A result may differ from what Python computed by this share of its RMS.
struct Output {
  at::Tensor expected;
  double limit;
};

struct Scene {
  Tensors inputs;
  std::vector<Output> outputs;
};

at::ScalarType dtype_of(const std::string &name) {
  static const std::vector<std::pair<std::string, at::ScalarType>> known{
      {"float32", at::kFloat},     {"float64", at::kDouble}, {"float16", at::kHalf},
      {"bfloat16", at::kBFloat16}, {"int32", at::kInt},      {"int64", at::kLong},
      {"int16", at::kShort},       {"int8", at::kChar},      {"uint8", at::kByte},
      {"bool", at::kBool}};
  for (const auto &[text, dtype] : known)
    if (text == name) return dtype;
  throw std::runtime_error("scenes.txt names the dtype " + name + ", which this reader lacks");
}

// The tensor that a line of scenes.txt describes: DTYPE DIMENSIONS SIZE ..., its values next in
// scenes.bin.
at::Tensor read_tensor(std::istream &text, std::istream &values) {
  std::string dtype;
  size_t dimensions = 0;
  text >> dtype >> dimensions;
  std::vector<int64_t> sizes(dimensions);
  for (int64_t &size : sizes) text >> size;
  at::Tensor made = at::empty(sizes, dtype_of(dtype));
  values.read(static_cast<char *>(made.data_ptr()), std::streamsize(made.nbytes()));
  if (!text || !values) throw std::runtime_error("scenes.txt and scenes.bin do not fit each other");
  return made;
}

std::vector<Scene> read_scenes(const std::string &folder) {
  std::ifstream text(folder + "/scenes.txt"), values(folder + "/scenes.bin", std::ios::binary);
  if (!text || !values) throw std::runtime_error("no scenes.txt and scenes.bin in " + folder);
  std::vector<Scene> scenes;
  for (std::string word; text >> word;) {
    if (word == "scene") {
      scenes.emplace_back();
    } else if (scenes.empty()) {
      throw std::runtime_error("scenes.txt starts with " + word + "; expected scene");
    } else if (word == "input") {
      scenes.back().inputs.push_back(read_tensor(text, values));
    } else if (word == "output") {
      double limit = 0;
      text >> limit;
      scenes.back().outputs.push_back({read_tensor(text, values), limit});
    } else {
      throw std::runtime_error("scenes.txt says " + word);
    }
  }
  if (scenes.empty()) throw std::runtime_error("no scene in " + folder + "/scenes.txt");
  return scenes;
}

// RMS of the difference, as a share of the RMS of what was expected; NaN where shapes differ.
double error_of(const at::Tensor &found, const at::Tensor &expected) {
  if (found.sizes() != expected.sizes() || found.scalar_type() != expected.scalar_type())
    return std::nan("");
  const at::Tensor wanted = expected.to(at::kDouble);
  const double difference = found.to(at::kDouble).sub(wanted).norm().item<double>();
  return difference == 0 ? 0 : difference / wanted.norm().item<double>();
}

bool agree(const Scene &scene, const Tensors &found, double &worst) {
  bool good = found.size() == scene.outputs.size();
  for (size_t i = 0; good && i < found.size(); ++i) {
    const double error = error_of(found[i], scene.outputs[i].expected);
    worst = std::max(worst, error);
    good = error <= scene.outputs[i].limit; // not so for NaN
  }
  return good;
}

double milliseconds(torch::inductor::AOTIModelPackageLoader &model, const Tensors &inputs,
                    Tensors &found) {
  const auto begin = std::chrono::steady_clock::now();
  found = model.run(inputs);
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
      .count();
}

bool run(torch::inductor::AOTIModelPackageLoader &model, const Scene &scene, int repeat) {
  Tensors found;
  double least = milliseconds(model, scene.inputs, found), worst = 0;
  const bool same = agree(scene, found, worst);
  for (int again = 1; again < repeat; ++again)
    least = std::min(least, milliseconds(model, scene.inputs, found));
  const int64_t rows = scene.inputs.empty() ? 0 : scene.inputs[0].size(0);
  std::cout << rows << " rows, " << least << " ms, error " << worst
            << " of the RMS: " << (same ? "ok" : "DIFFERS") << std::endl;
  return same;
}

using Model = std::unique_ptr<torch::inductor::AOTIModelPackageLoader>;

// What torch says of a file has neither its name nor an end.
Model loaded(const std::string &path) {
  try {
    return std::make_unique<torch::inductor::AOTIModelPackageLoader>(path);
  } catch (const c10::Error &error) {
    throw std::runtime_error(path + " is no package that can be read: " +
                             error.what_without_backtrace());
  }
}

int run(const std::vector<std::string> &folders, int repeat) {
  sparse_bridge::load();
  std::vector<Model> models;
  for (const std::string &folder : folders) models.push_back(loaded(folder + "/model.pt2"));
  bool good = true;
  for (size_t i = 0; i < folders.size(); ++i)
    for (const Scene &scene : read_scenes(folders[i])) {
      std::cout << folders[i] << ": " << std::flush;
      good = run(*models[i], scene, repeat) && good;
    }
  return good ? 0 : 1;
}

// What an operator refused; AOTInductor itself may only tell where it was called.
int report(const char *what) {
  const std::string refused = sparse_bridge::last_error();
  std::cerr << (refused.empty() ? what : refused) << std::endl;
  return 2;
}

} // namespace

int main(int count, char **words) {
  std::vector<std::string> folders;
  int repeat = 1;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    if (word == "--repeat" && i + 1 < count && std::atoi(words[i + 1]) > 0) {
      repeat = std::atoi(words[++i]);
    } else if (word.rfind("-", 0) == 0) {
      std::cerr << "usage: run_package [--repeat N] FOLDER ..." << std::endl;
      return 2;
    } else {
      folders.push_back(word);
    }
  }
  if (folders.empty()) folders.push_back(".");
  try {
    c10::InferenceMode guard;
    return run(folders, repeat);
  } catch (const c10::Error &error) {
    return report(error.what_without_backtrace());
  } catch (const std::exception &error) {
    return report(error.what());
  }
}
