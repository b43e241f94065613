#pragma once

#include "cuda_runtime.h"

using cudaEvent_t = void*;
