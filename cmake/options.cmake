# Compiler options shared by every target of the project.
add_library(torus_options INTERFACE)

set(cxx_flags -Wall -Wextra -Wshadow=local -Wold-style-cast -Wno-unused-parameter -Wno-missing-field-initializers
    -Wno-restrict
    -fno-fast-math
    -ffp-contract=off -D_FORTIFY_SOURCE=2 -fstack-protector-strong)
if(TORUS_SANITIZE)
    list(REMOVE_ITEM cxx_flags -D_FORTIFY_SOURCE=2)
    list(APPEND cxx_flags -fsanitize=address,undefined -fno-sanitize-recover=undefined
         -fno-omit-frame-pointer)
    target_link_options(torus_options INTERFACE -fsanitize=address,undefined)
endif()
foreach(flag ${cxx_flags})
    target_compile_options(torus_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:${flag}>)
endforeach()
target_link_options(torus_options INTERFACE -Wl,-z,relro,-z,now)

if(TORUS_HAVE_CUDA)
    # CMake 3.25 drops CMAKE_CUDA_STANDARD 20 for nvcc 13.
    target_compile_options(torus_options INTERFACE
        $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20>
        $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>
        "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Wno-unused-parameter,-Wno-missing-field-initializers,-Wno-restrict>")
endif()
