# The C++ tests: one program of all tests/csrc/<layer>/test_*.cc; ctest runs each test in a process of its own.
enable_testing()

find_package(GTest QUIET)
if(NOT GTest_FOUND)
  # Its sources, as `make` fetches them from Debian's archive.
  find_path(GTEST_SOURCE src/gtest-all.cc
    PATHS /usr/src/googletest/googletest
          ${CMAKE_SOURCE_DIR}/build/googletest/usr/src/googletest/googletest)
  if(NOT GTEST_SOURCE)
    message(FATAL_ERROR "GoogleTest not found: apt-get install libgtest-dev, or set GTest_ROOT")
  endif()
  add_library(gtest STATIC ${GTEST_SOURCE}/src/gtest-all.cc ${GTEST_SOURCE}/src/gtest_main.cc)
  target_include_directories(gtest SYSTEM PUBLIC ${GTEST_SOURCE}/include PRIVATE ${GTEST_SOURCE})
  target_compile_options(gtest PRIVATE -O0)
  target_link_libraries(gtest PUBLIC Threads::Threads)
  add_library(GTest::gtest_main ALIAS gtest)
endif()

file(GLOB_RECURSE test_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/csrc/test_*.cc)
# These have one thread, in which ThreadSanitizer has nothing to see; a warp's lanes have one each.
if(BAGUA_SANITIZE STREQUAL thread)
  list(FILTER test_sources EXCLUDE REGEX "/tests/csrc/(kernel/|codec/test_(codecs|gpu|tile))")
endif()
add_executable(bagua_tests ${test_sources})
target_link_libraries(bagua_tests PRIVATE bagua_core GTest::gtest_main)
target_include_directories(bagua_tests PRIVATE ${CMAKE_SOURCE_DIR}/tests/csrc)
# What is tested is optimized as in an installation; the tests themselves are to compile soon, which with
# what sanitizers add takes twice as long at -O1.
if(BAGUA_SANITIZE)
  target_compile_options(bagua_tests PRIVATE -O0)
  # Sanitizers describe each line in data with addresses, which would be relocated for every test.
  target_link_options(bagua_tests PRIVATE -no-pie)
else()
  target_compile_options(bagua_tests PRIVATE -O1)
  # What rank 0 does in a large job, and what the engine takes for an exchange; not run as tests.
  foreach(name agreement exchange)
    add_executable(bench_${name} ${CMAKE_SOURCE_DIR}/benchmarks/${name}.cc)
    target_link_libraries(bench_${name} PRIVATE bagua_core)
  endforeach()
endif()
target_precompile_headers(bagua_tests PRIVATE <gtest/gtest.h>)
# Not in the extension: there what is used has to be included. Loops are compiled with options of their own.
if(NOT BAGUA_BUILT)
  target_precompile_headers(bagua_core PRIVATE <algorithm> <atomic> <condition_variable> <functional> <future>
    <map> <memory> <mutex> <set> <sstream> <string> <thread> <vector>)
  set_source_files_properties(${loop_sources} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
endif()

include(GoogleTest)
gtest_discover_tests(bagua_tests DISCOVERY_MODE PRE_TEST PROPERTIES TIMEOUT 300)
