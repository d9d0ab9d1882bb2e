// A libnvrtc.so for machines without a GPU: compiles a kernel's own source for the host, where driver.cpp runs it. What
// it makes is a shared library, which travels through the cache and the loader as a cubin does.
//
//   MOCK_PATCHES=folder  the text of a NAME.old in it becomes that of NAME.new   MOCK_FLAGS=flags   for g++
//   MOCK_FAIL=name       that function fails                                     MOCK_COUNT=file    a byte per compilation
//   MOCK_STORE=folder    what was compiled stays there, named by all that it was made of
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>

namespace {

enum { OK = 0, OUT_OF_MEMORY = 1, COMPILATION = 6 };

struct Program {
  std::string source, log, binary;
};

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream all;
  all << file.rdbuf();
  return all.str();
}
bool fails(const char* name) {
  const char* wanted = getenv("MOCK_FAIL");
  return wanted && !strcmp(wanted, name);
}
#define FAIL_IF_ASKED if (fails(__func__)) return OUT_OF_MEMORY

void plant(std::string& source) {
  const char* folder = getenv("MOCK_PATCHES");
  if (!folder) return;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    auto path = entry.path();
    if (path.extension() != ".old") continue;
    const std::string before = contents(path);
    const size_t at = source.find(before);
    if (at != std::string::npos) source.replace(at, before.size(), contents(path.replace_extension(".new")));
  }
}

// g++'s command, short of the files it reads and writes.
std::string command_for(int count, const char* const* options) {
  const char* flags = getenv("MOCK_FLAGS");
  std::string command = "g++ -O1 -shared -fPIC -ffp-contract=off -fsanitize=alignment -fsanitize-undefined-trap-on-error -Wall -Wno-unknown-pragmas -Wno-unused-variable -include " HOST_HEADER;
  for (int i = 0; i < count; i++)
    if (strncmp(options[i], "--gpu", 5) && strncmp(options[i], "--ptx", 5)) command += std::string(" ") + options[i];
  return command + " " + (flags ? flags : "");
}

// Kernels need nothing of the C++ library. Linking it takes a third of a kernel's compilation.
const char* const LIBRARIES = " -nostdlib -lm -lc";

// Where the store has what this command makes of this source.
std::filesystem::path place_in_store(const std::string& command, const std::string& source) {
  const char* store = getenv("MOCK_STORE");
  if (!store) return {};
  const auto made_of = {command, source, contents(HOST_HEADER), std::string(__VERSION__)};
  size_t name = 0;
  for (const auto& part : made_of) name = name * 0x9E3779B97F4A7C15 + std::hash<std::string>{}(part);
  return std::filesystem::path(store) / std::to_string(name);
}

void put(const std::filesystem::path& place, const std::string& binary) {
  std::error_code ignored;  // a store that cannot be written costs time only
  std::filesystem::create_directories(place.parent_path(), ignored);
  const std::string aside = place.string() + "." + std::to_string(getpid());
  std::ofstream file(aside, std::ios::binary);
  file << binary;
  file.close();
  if (file) std::filesystem::rename(aside, place, ignored);
  else std::filesystem::remove(aside, ignored);  // no half of a kernel stays
}

}  // namespace

extern "C" {
int nvrtcVersion(int* major, int* minor) {
  *major = 0, *minor = 1;
  return OK;
}
const char* nvrtcGetErrorString(int code) { return code == COMPILATION ? "COMPILATION" : "OUT_OF_MEMORY"; }
int nvrtcCreateProgram(void** made, const char* source, const char*, int, const char* const*, const char* const*) {
  FAIL_IF_ASKED;
  *made = new Program{source, "", ""};
  return OK;
}
int nvrtcDestroyProgram(void** program) {
  delete (Program*)*program;
  return OK;
}
int nvrtcCompileProgram(void* program, int count, const char* const* options) {
  FAIL_IF_ASKED;
  auto* p = (Program*)program;
  if (const char* counter = getenv("MOCK_COUNT")) std::ofstream(counter, std::ios::app) << 'x';
  plant(p->source);
  std::string command = command_for(count, options);
  const auto kept = place_in_store(command + LIBRARIES, p->source);
  if (!kept.empty() && !(p->binary = contents(kept)).empty()) {
    std::error_code ignored;
    std::filesystem::last_write_time(kept, std::filesystem::file_time_type::clock::now(), ignored);
    return OK;
  }
  char folder[] = "/tmp/kernel-XXXXXX";
  if (!mkdtemp(folder)) return OUT_OF_MEMORY;
  const std::string base = folder, source = base + "/k.cpp", binary = base + "/k.so", log = base + "/log";
  std::ofstream(source) << p->source;
  command += " -o " + binary + " " + source + LIBRARIES + " 2>" + log;
  const int status = system(command.c_str());
  p->log = contents(log);
  p->binary = contents(binary);
  for (const auto& f : {source, binary, log}) unlink(f.c_str());
  rmdir(folder);
  if (status == 0 && !kept.empty()) put(kept, p->binary);
  return status == 0 ? OK : COMPILATION;
}
int nvrtcGetProgramLogSize(void* program, size_t* size) {
  *size = ((Program*)program)->log.size() + 1;
  return OK;
}
int nvrtcGetProgramLog(void* program, char* to) {
  strcpy(to, ((Program*)program)->log.c_str());
  return OK;
}
int nvrtcGetCUBINSize(void* program, size_t* size) {
  FAIL_IF_ASKED;
  *size = ((Program*)program)->binary.size();
  return OK;
}
int nvrtcGetCUBIN(void* program, char* to) {
  FAIL_IF_ASKED;
  const auto& binary = ((Program*)program)->binary;
  memcpy(to, binary.data(), binary.size());
  return OK;
}
}
