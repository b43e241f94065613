# cmake -DHOST=... -DNVCC=... -DSOURCE=... -DINCLUDES=a;b -DWORK=... -P compare_digests.cmake
# Compile digest.cpp with nvcc too and compare what both programs print.
if(NOT NVCC)
  message(STATUS "SKIPPED: nvcc is not on this machine, so nvcc-compiled host code cannot be compared")
  return()
endif()
set(flags)
foreach(directory IN LISTS INCLUDES)
  list(APPEND flags "-I${directory}")
endforeach()
file(MAKE_DIRECTORY "${WORK}")
execute_process(
  COMMAND "${NVCC}" -x cu -std=c++17 -O2 -Xcompiler -ffp-contract=off --Werror all-warnings ${flags} "${SOURCE}" -o "${WORK}/digest_nvcc"
  COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${WORK}/digest_nvcc" OUTPUT_VARIABLE from_nvcc COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${HOST}" OUTPUT_VARIABLE from_host COMMAND_ERROR_IS_FATAL ANY)
if(NOT from_nvcc STREQUAL from_host)
  message(FATAL_ERROR "host compiler printed ${from_host} but nvcc's program printed ${from_nvcc}")
endif()
message(STATUS "equal: ${from_host}")
