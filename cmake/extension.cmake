# The Python extension: the engine, the mpi transport and the bindings.
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
find_package(pybind11 CONFIG REQUIRED)

# MPI's deprecated C++ interface is not ours; without it the C library is all that is linked.
set(MPI_CXX_SKIP_MPICXX ON)
find_package(MPI REQUIRED COMPONENTS CXX)
message(STATUS "Building against MPI: ${MPI_CXX_COMPILER} (${MPI_CXX_LIBRARIES})")

file(GLOB python_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/csrc/python/*.cc)
pybind11_add_module(_core MODULE NO_EXTRAS
  ${python_sources}
  ${CMAKE_SOURCE_DIR}/csrc/transport/mpi.cc)
target_include_directories(_core SYSTEM PRIVATE ${MPI_CXX_INCLUDE_DIRS})
target_compile_definitions(_core PRIVATE BAGUA_VERSION="${BAGUA_VERSION}" ${MPI_CXX_COMPILE_DEFINITIONS})
target_compile_options(_core PRIVATE ${MPI_CXX_COMPILE_OPTIONS})

# The libraries but not the wrapper's link flags: those carry an rpath to where MPI lies now, which may
# be a build environment. At run time mpi4py has loaded libmpi, and its soname satisfies ours.
target_link_libraries(_core PRIVATE bagua_core ${MPI_CXX_LIBRARIES})
target_link_options(_core PRIVATE LINKER:--as-needed)
set_target_properties(_core PROPERTIES
  SKIP_BUILD_RPATH ON
  LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
